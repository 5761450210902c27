from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.placement import cyclic
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.schedule import Pass, Schedule
from lightning_zb.planning.simulation import tabulate
from lightning_zb.planning.timeline import Timeline, memory_curves, overlapped_seconds, simulate, steady_period
from tests.planning import reference
from tests.planning.paper import unit_costs


def two_stages(link, size=0.0):
    costs = CostModel(tuple(LayerCost(f"{i}", 1, 2, 3, 10, 4, output_bytes=size) for i in range(2)), link)
    return costs, tuple(costs.chunk([i]) for i in range(2))


def test_by_hand():
    costs, chunks = two_stages(Link(latency=0.5))
    schedule = Schedule.parse([["F0.0", "B0.0", "W0.0"], ["F1.0", "B1.0", "W1.0"]])
    timeline = simulate(schedule, cyclic(2), chunks, costs)
    assert timeline.starts == ((0.0, 5.0, 7.0), (1.5, 2.5, 4.5))
    assert timeline.spans == (10.0, 6.0)
    assert (timeline.step_time, timeline.makespan, timeline.busy) == (10.0, 10.0, (6.0, 6.0))
    assert timeline.idle_fraction == pytest.approx(8 / 20)
    assert timeline.times()[Pass.parse("B1.0")] == (2.5, 4.5)
    assert memory_curves(schedule, cyclic(2), chunks)[0] == (10, 4, 0)


def test_fifo_links_queue():
    costs, chunks = two_stages(Link(bandwidth=1.0), size=4.0)
    schedule = Schedule.parse([["F0.0", "F0.1", "BW0.0", "BW0.1"], ["F1.0", "F1.1", "BW1.0", "BW1.1"]])
    free = simulate(schedule, cyclic(2), chunks, costs)
    queued = simulate(schedule, cyclic(2), chunks, costs, fifo_links=True)
    assert free.starts[1][:2] == (5.0, 6.0)
    assert queued.starts[1][:2] == (5.0, 9.0)  # the second transfer leaves when the first has arrived


def test_overlap_counts_transfers_behind_work():
    costs, chunks = two_stages(Link(latency=1.0))
    schedule = Schedule.parse([["F0.0", "F0.1", "BW0.0", "BW0.1"], ["F1.0", "F1.1", "BW1.0", "BW1.1"]])
    timeline = simulate(schedule, cyclic(2), chunks, costs)
    # F1.0 runs from 2 to 3 while the second input is on its way
    assert overlapped_seconds(timeline, cyclic(2), chunks, costs)[1] == pytest.approx(1.0)


def test_measured_times_have_figures_too():
    measured = Timeline(((Pass.parse("F0.0"), Pass.parse("BW0.0")),), ((1.0, 3.0),), ((2.0, 4.5),), (((2.0, 3.0),),))
    assert (measured.step_time, measured.busy) == (3.5, (2.5,))


def test_deadlocks_are_errors():
    costs, chunks = two_stages(Link())
    schedule = Schedule.parse([["F0.0", "BW0.0", "F0.1", "BW0.1"], ["F1.0", "F1.1", "BW1.0", "BW1.1"]])
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(schedule, cyclic(2), chunks, costs)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_several_steps_back_to_back(data):
    """The period is never above step_time but for the validation edge, and is what an independent simulation finds."""
    num_devices = data.draw(st.integers(1, 4))
    costs = data.draw(reference.cost_models(2 * num_devices, num_devices, stash_above_activation=False))
    name = data.draw(st.sampled_from(["1f1b", "interleaved", "zb-h2", "zb-v", "wave-1f1b"]))
    plan = make_plan(costs, num_devices, data.draw(st.integers(1, 6)), name)
    chunk_costs = costs.chunks(plan.partition)
    table = tabulate(plan.placement, chunk_costs, costs, plan.num_microbatches)
    order, offsets = table.encode(plan.schedule)
    assert table.decode(order, offsets) == plan.schedule
    free = steady_period(table, order, offsets, costs, validation=False)
    assert max(plan.predicted.busy) - 1e-9 <= free <= plan.predicted.step_time + 1e-9
    assert plan.predicted.period >= free - 1e-9
    for validation, ours in ((False, free), (True, plan.predicted.period)):
        theirs = reference.period(plan.schedule, plan.placement, chunk_costs, costs, validation)
        assert ours == pytest.approx(theirs), validation


def test_zero_bubble_needs_devices_out_of_step():
    predicted = make_plan(unit_costs(8), 8, 32, "zb-h2").predicted
    assert (predicted.step_time, predicted.period, predicted.makespan) == pytest.approx((96.0, 96.0, 103.0))
    assert predicted.bubble_rate == pytest.approx(0.0)
