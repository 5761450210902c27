"""Whole backwards where they help: never slower, never more memory, nothing lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning import planner
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.fusing import fuse_backward, split_backward
from lightning_zb.planning.placement import cyclic
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import Problem, ScheduleSpec, find_schedule
from lightning_zb.planning.schedule import PassKind, Schedule
from lightning_zb.planning.timeline import simulate
from tests.planning import reference


def costs_of(num_layers, backward, link=0.0):
    return CostModel(tuple(LayerCost(f"{i}", 1, 1, 1, 1.0, 0.5, backward=backward) for i in range(num_layers)), Link(link))


def num_whole(schedule):
    return sum(p.kind is PassKind.BACKWARD for p in schedule.passes())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_never_slower_never_more_memory(data):
    num_devices = data.draw(st.integers(1, 4))
    costs = data.draw(reference.cost_models(2 * num_devices, num_devices))
    spec = find_schedule(data.draw(st.sampled_from(["zb-h1", "zb-h2", "zb", "zb-v", "v-half"])))
    assert isinstance(spec, ScheduleSpec)
    placement = spec.placement(num_devices, 2 * num_devices)
    share = len(costs.layers) // placement.num_chunks
    chunks = tuple(costs.chunk(range(c * share, (c + 1) * share)) for c in range(placement.num_chunks))
    limits = (float("inf"),) * num_devices
    before = spec.build(Problem(placement, chunks, costs, data.draw(st.integers(1, 6)), limits))
    after = fuse_backward(before, placement, chunks, costs)
    after.check(placement)
    assert [[letter for p in order for letter in p.kind.value] for order in after.orders] == [
        [letter for p in order for letter in p.kind.value] for order in before.orders
    ]
    old, new = simulate(before, placement, chunks, costs), simulate(after, placement, chunks, costs)
    assert new.step_time <= old.step_time
    assert new.makespan <= old.makespan
    peaks = zip(reference.peaks(after, placement, chunks), reference.peaks(before, placement, chunks), strict=True)
    assert all(now <= then + 1e-12 for now, then in peaks)
    if all(c.saved_by_fusing <= 0 for c in chunks):
        assert after == before


def test_a_gradient_that_stays_is_no_reason_to_split():
    costs = costs_of(2, backward=1.5)
    chunks = costs.chunk([0]), costs.chunk([1])
    split = Schedule.parse([["F0.0", "B0.0", "W0.0"], ["F1.0", "B1.0", "W1.0"]])
    fused = fuse_backward(split, cyclic(2), chunks, costs)
    # W1.0 runs beside B0.0; a BW1.0 would let chunk 0 wait for 0.5 more
    assert [str(p) for order in fused.orders for p in order] == ["F0.0", "BW0.0", "F1.0", "B1.0", "W1.0"]


def test_one_device_runs_every_backward_whole():
    plan = make_plan(costs_of(4, backward=1.5), 1, 5, "zb-h1")
    assert num_whole(plan.schedule) == 5
    assert plan.predicted.step_time == pytest.approx(5 * 4 * 2.5)
    assert plan.predicted.bubble_rate == pytest.approx(0.0)
    assert plan.predicted.lower_bound == pytest.approx(plan.predicted.step_time)


def test_a_whole_backward_is_priced_as_measured():
    plan = make_plan(costs_of(4, backward=1.5), 4, 8, "1f1b")
    assert plan.predicted.step_time == pytest.approx((8 + 3) * 2.5)
    assert plan.predicted.bubble_rate == pytest.approx(3 / 11)
    assert plan.ideal_seconds == pytest.approx(8 * 2.5)
    assert make_plan(costs_of(4, backward=None), 4, 8, "1f1b").predicted.step_time == pytest.approx((8 + 3) * 3)


def test_where_a_whole_backward_takes_longer_nothing_is_fused():
    for name in ("zb-h1", "zb-v", "auto"):
        assert num_whole(make_plan(costs_of(8, backward=2.5), 4, 8, name).schedule) == 0


@pytest.mark.parametrize("name", ["zb-h1", "zb", "zb-v", "auto"])
def test_plans_gain_where_a_whole_backward_is_shorter(name):
    apart, whole = (make_plan(costs_of(24, backward, 0.1), 4, 16, name) for backward in (None, 1.6))
    assert num_whole(whole.schedule) > 0
    assert whole.predicted.step_time < apart.predicted.step_time
    assert whole.predicted.lower_bound <= whole.predicted.step_time


def test_a_gradient_that_others_wait_for_leaves_before_w():
    """Whole backwards in the middle, split ones where the pipeline drains."""
    costs = costs_of(4, backward=1.9)
    chunks = tuple(costs.chunk([i]) for i in range(4))
    order = make_plan(costs, 4, 8, "1f1b").schedule
    split = split_backward(order, cyclic(4), chunks, costs)
    split.check(cyclic(4))
    old, new = simulate(order, cyclic(4), chunks, costs), simulate(split, cyclic(4), chunks, costs)
    assert new.step_time < old.step_time
    assert 0 < num_whole(split) < 32
    heavy = tuple(replace(c, weight_stash_bytes=2.0) for c in chunks)
    assert split_backward(order, cyclic(4), heavy, costs) == order


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_splitting_is_never_slower_nor_takes_more_memory(data):
    num_devices = data.draw(st.integers(1, 4))
    costs = data.draw(reference.cost_models(2 * num_devices, num_devices))
    plan = make_plan(costs, num_devices, data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["1f1b", "interleaved"])))
    arguments = plan.placement, costs.chunks(plan.partition), costs
    after = split_backward(plan.schedule, *arguments)
    after.check(plan.placement)
    old, new = simulate(plan.schedule, *arguments), simulate(after, *arguments)
    assert new.step_time <= old.step_time
    assert new.makespan <= old.makespan
    peaks = reference.peaks(after, *arguments[:2]), reference.peaks(plan.schedule, *arguments[:2])
    assert all(now <= then + 1e-12 for now, then in zip(*peaks, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whole_backwards_keep_the_limits_of_memory(data):
    num_devices = data.draw(st.integers(1, 3))
    costs = data.draw(reference.cost_models(2 * num_devices, num_devices, stash_above_activation=False))
    budget = data.draw(st.sampled_from([1.0, 1.25, 2.0]))
    plan = make_plan(costs, num_devices, data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["zb", "zb-v"])), budget)
    chunks = costs.chunks(plan.partition)
    peaks = reference.peaks(plan.schedule, plan.placement, chunks)
    assert all(peak <= budget * costs.activation_bytes * (1 + 1e-9) for peak in peaks)
    assert plan.predicted.peak_bytes == pytest.approx(peaks)
    assert reference.ascending(plan.schedule)
    assert plan.predicted.lower_bound <= plan.predicted.step_time * (1 + 1e-9)


def test_a_search_looks_at_both_ways_and_goes_on_with_one(monkeypatch):
    spec, efforts = find_schedule("auto"), []

    def plan(request):
        efforts.append(request.options["effort"])
        return spec.plan(request)

    monkeypatch.setattr(planner, "find_schedule", lambda name: replace(spec, plan=plan))
    assert num_whole(planner.make_plan(costs_of(4, backward=1.5), 2, 4, "auto", effort=12).schedule) > 0
    assert efforts == [2, 2, 8]


@pytest.mark.parametrize(
    ("whole_at_first", "num_microbatches", "chosen"),
    [(1.02, 8, "whole"), (1.1, 8, "split"), (1.02, 64, "split")],
)
def test_a_small_problem_goes_on_in_both_ways_where_they_are_close(monkeypatch, whole_at_first, num_microbatches, chosen):
    costs = costs_of(4, backward=1.5)
    base, given = make_plan(costs, 2, 2, "1f1b"), []

    def way(name, first, then):
        def plan(request):
            given.append(request.options["seconds"])
            seconds = first if request.options["effort"] < 12 / 2 else then
            predicted = replace(base.predicted, step_time=seconds)
            return replace(base, predicted=predicted, planner=replace(base.planner, reason=name))

        return plan

    whole = way("whole", whole_at_first, 0.9)
    monkeypatch.setattr(planner, "_plan_whole", lambda spec, request: whole(request))
    spec = replace(find_schedule("auto"), plan=way("split", 1.0, 0.95))
    monkeypatch.setattr(planner, "find_schedule", lambda name: spec)
    assert planner.make_plan(costs, 2, num_microbatches, "auto", effort=12, seconds=6.0).planner.reason == chosen
    assert sum(given) == pytest.approx(6.0)
