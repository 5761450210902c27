"""Every schedule, on random problems, against an independent judge."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import ScheduleSpec, find_schedule, known_schedules
from lightning_zb.planning.schedule import PassKind
from tests.planning import reference
from tests.planning.paper import ROWS, unit_costs

NAMES = [name.replace("-N", "-3") for name in known_schedules()]
FIXED = [name for name in NAMES if find_schedule(name).fixed_order]
LIMITED = [name for name in NAMES if isinstance(find_schedule(name), ScheduleSpec) and name not in FIXED]
SEARCHED = [name for name in NAMES if not isinstance(find_schedule(name), ScheduleSpec)]

quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def judge(plan):
    """Complete, runnable, ascending, within its limit, and predicted as an independent simulation runs it."""
    plan.schedule.check(plan.placement)
    assert reference.ascending(plan.schedule)
    chunk_costs = plan.costs.chunks(plan.partition)
    peaks = reference.peaks(plan.schedule, plan.placement, chunk_costs)
    assert plan.predicted.peak_bytes == pytest.approx(peaks)
    for peak, limit in zip(peaks, plan.memory_limit or [float("inf")] * len(peaks), strict=True):
        assert peak <= limit * (1 + 1e-6)
    times = reference.run(plan.schedule, plan.placement, chunk_costs, plan.costs)
    spans = [times[order[-1]][1] - times[order[0]][0] for order in plan.schedule.orders]
    assert plan.predicted.makespan == pytest.approx(max(end for _, end in times.values()))
    assert plan.predicted.step_time == pytest.approx(max(spans))


@st.composite
def problems(draw, name, stash_above_activation=False):
    """Costs, devices and microbatches for a schedule; some layers more than it has chunks."""
    num_devices = draw(st.integers(1, 4))
    spec = find_schedule(name)
    num_chunks = spec.placement(num_devices, num_devices * 2).num_chunks if isinstance(spec, ScheduleSpec) else num_devices
    num_layers = num_chunks + draw(st.integers(0, 2))
    return draw(reference.cost_models(num_layers, num_devices, stash_above_activation)), num_devices, draw(st.integers(1, 9))


def options(name):
    """Little effort for what searches."""
    return {} if isinstance(find_schedule(name), ScheduleSpec) else {"effort": 1}


def judge_any_problem(name, data):
    judge(make_plan(*data.draw(problems(name)), name, **options(name)))


def judge_just_enough_memory(name, data):
    """At least one device has no byte more than the schedule needs there at the least."""
    costs, num_devices, m = data.draw(problems(name, stash_above_activation=True))
    with pytest.raises(InfeasibleBudget) as caught:
        make_plan(costs, num_devices, m, name, memory_budget=[1e-6] * num_devices, **options(name))
    budgets = [least * data.draw(st.sampled_from([1.0, 1.1, 1.5, 4.0])) for least in caught.value.smallest]
    tight = data.draw(st.integers(0, num_devices - 1))
    budgets[tight] = caught.value.smallest[tight]
    judge(make_plan(costs, num_devices, m, name, memory_budget=budgets, **options(name)))


@pytest.mark.parametrize("name", FIXED + LIMITED)
@quick
@given(data=st.data())
def test_any_problem(name, data):
    judge_any_problem(name, data)


@pytest.mark.parametrize("name", [n for n in FIXED + LIMITED if find_schedule(n).own_budget is None])
@quick
@given(data=st.data())
def test_any_problem_on_devices_with_just_enough_memory(name, data):
    judge_just_enough_memory(name, data)


@pytest.mark.parametrize("judged", [judge_any_problem, judge_just_enough_memory])
@pytest.mark.parametrize("name", SEARCHED)
@settings(quick, max_examples=4)
@given(data=st.data())
def test_any_problem_that_is_searched(name, judged, data):
    """A search takes seconds where a builder takes milliseconds."""
    judged(name, data)


@quick
@given(data=st.data())
def test_any_placement_at_any_limit(data):
    placement = data.draw(reference.placements())
    num_devices = max(placement) + 1
    costs = data.draw(reference.cost_models(len(placement), num_devices))
    num_microbatches = data.draw(st.integers(1, 9))
    try:
        make_plan(costs, num_devices, num_microbatches, "zb", memory_budget=1e-6, placement=placement)
    except InfeasibleBudget as error:
        smallest = error.smallest
    budgets = [smallest * data.draw(st.sampled_from([1.0, 1.0, 1.1, 1.5, 4.0])) for _ in range(num_devices)]
    judge(make_plan(costs, num_devices, num_microbatches, "zb", memory_budget=budgets, placement=placement))


@pytest.mark.parametrize("name", ["zb", "zb-v", "wave-4"])
def test_one_tight_device(name):
    costs = unit_costs(4, 4)
    judge(make_plan(costs, 4, 12, name, memory_budget=[1.0, 0.4, 1.0, 1.0]))


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_fewer_microbatches_than_devices(num_microbatches):
    for name in FIXED + LIMITED:
        judge(make_plan(unit_costs(8, 4), 8, num_microbatches, name))


def test_more_memory_is_used():
    times = [make_plan(unit_costs(4), 4, 16, "zb", memory_budget=b).predicted.step_time for b in (0.25, 0.5, 1.0, 2.0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(48.0)


@pytest.mark.parametrize("name", ["zb", "zb-v"])
@pytest.mark.parametrize("row", [ROWS[0], ROWS[3], ROWS[6]], ids=lambda row: row.name)
def test_more_memory_is_never_worse(row, name):
    budgets = (1.0, 1.25, 1.5, 1.75, 2.0, 3.0)
    plans = [make_plan(row.costs(2), row.num_devices, row.num_microbatches, name, memory_budget=b) for b in budgets]
    times = [plan.predicted.step_time for plan in plans]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))


def test_weights_stay_with_their_pass_where_nothing_waits():
    for name in ("gpipe", "1f1b", "interleaved", "wave-1f1b"):
        kinds = {p.kind for p in make_plan(unit_costs(2, 2), 2, 4, name).schedule.passes()}
        assert kinds == {PassKind.FORWARD, PassKind.BACKWARD}


def test_a_wave_of_whole_backwards_lies_between_1f1b_and_split_ones():
    """Whole backward passes on a V save warm-up and cool-down over 1f1b, within its memory; splitting them saves more."""
    for m in (8, 32):
        one, wave, split = (make_plan(unit_costs(8, 2), 8, m, name).predicted for name in ("1f1b", "wave-1f1b", "zb-v"))
        assert split.makespan < wave.makespan < one.makespan
        assert max(wave.peak_bytes) <= max(one.peak_bytes) * (1 + 1e-9)
    # a fixed order: the costs decide its times and nothing else
    slow_links = CostModel(unit_costs(4, 3).layers, Link(2.0))
    first, second = (make_plan(costs, 4, 8, "wave-1f1b") for costs in (unit_costs(4, 2), slow_links))
    assert first.schedule == second.schedule


def test_own_budget_is_part_of_the_name():
    costs = unit_costs(2)
    assert make_plan(costs, 2, 4, "zb-2p").memory_limit == (4.0, 4.0)
    with pytest.raises(ValueError, match="write schedule 'zb'"):
        make_plan(costs, 2, 4, "zb-2p", memory_budget=1.5)


def test_infeasible_budgets_say_the_smallest():
    costs = unit_costs(4)
    for name in ("zb", "1f1b", "gpipe"):
        with pytest.raises(InfeasibleBudget, match="smallest that fits is") as caught:
            make_plan(costs, 4, 6, name, memory_budget=0.1)
        smallest = caught.value.smallest
        judge(make_plan(costs, 4, 6, name, memory_budget=smallest))
        with pytest.raises(InfeasibleBudget):
            make_plan(costs, 4, 6, name, memory_budget=smallest - 0.01)


def test_sizes_are_the_whole_device():
    layers = tuple(LayerCost(f"{i}", 1, 1, 1, 2**20, 0, parameter_bytes=2**20, state_bytes=5 * 2**20) for i in range(4))
    costs = CostModel(layers)
    plan = make_plan(costs, 2, 4, "1f1b", memory_budget="14MiB")
    assert plan.memory_limit == (4 * 2**20, 4 * 2**20)
    with pytest.raises(InfeasibleBudget) as caught:
        make_plan(costs, 2, 4, "1f1b", memory_budget="13MiB")
    assert caught.value.smallest == "14MiB"


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"'zb-w' is unknown; known are .*1f1b.*zb-v.*wave-N"):
        make_plan(unit_costs(2), 2, 4, "zb-w")


def test_placements_that_do_not_suit():
    with pytest.raises(ValueError, match="one chunk on each device"):
        make_plan(unit_costs(2, 2), 2, 4, "1f1b", placement=[0, 1, 1, 0])
    with pytest.raises(ValueError, match="in turn"):
        make_plan(unit_costs(2, 2), 2, 4, "interleaved", placement=[0, 1, 1, 0])
    with pytest.raises(ValueError, match="in a V"):
        make_plan(unit_costs(2, 2), 2, 4, "v-half", placement=[0, 1, 0, 1])


def test_every_name_says_what_it_assumes_and_holds():
    for name in known_schedules():
        spec = find_schedule(name.replace("-N", "-2"))
        assert spec.assumption
        assert spec.memory
        if spec.own_budget is not None:
            assert not spec.fixed_order
