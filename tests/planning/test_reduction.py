"""Gradients reduced over replicas: each reduction follows its chunk's last W beside the passes; the step ends with the last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.annealing import anneal
from lightning_zb.planning.bounds import Objective, bounds_of_orders
from lightning_zb.planning.cooptimize.layout import Layout
from lightning_zb.planning.cooptimize.scoring import Scorer
from lightning_zb.planning.costs import CostModel, LayerCost, Link, Reduction
from lightning_zb.planning.instance import build_instance, from_schedule, measure
from lightning_zb.planning.placement import Placement, cyclic
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.random_stream import new_stream
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.search import search
from lightning_zb.planning.timeline import simulate
from tests.planning import reference


def with_reduction(costs: CostModel, num_replicas: int = 2, bandwidth: float = 1.0, parameters: float = 1.0) -> CostModel:
    layers = tuple(replace(layer, parameter_bytes=parameters * (1 + i % 3)) for i, layer in enumerate(costs.layers))
    return replace(costs, layers=layers, reduction=Reduction(num_replicas, Link(0.0, bandwidth)))


def test_a_ring_moves_the_bytes_nearly_twice():
    assert Reduction(1, Link(1.0, 1.0)).seconds(8.0) == 0.0
    assert Reduction(2, Link(0.0, 4.0)).seconds(8.0) == pytest.approx(2.0)
    assert Reduction(4, Link(0.5, 4.0)).seconds(8.0) == pytest.approx(2 * 3 * (0.5 + 8 / 4 / 4))


def test_the_step_ends_with_the_last_reduction():
    """1f1b on equal stages: the reduction of the last stage hides behind the cool-down, that of the first does not."""
    layers = tuple(LayerCost(f"{i}", 1, 1, 1, parameter_bytes=5.0) for i in range(3))
    plan = make_plan(CostModel(layers, reduction=Reduction(2, Link(0.0, 1.0))), 3, 4, "1f1b")
    assert plan.predicted.step_time == pytest.approx((4 + 2) * 3 + 5)
    assert plan.predicted.makespan == pytest.approx((4 + 2) * 3 + 5)
    assert plan.predicted.busy == (12.0, 12.0, 12.0)
    assert plan.predicted.period >= plan.predicted.busy[0] + 5
    timeline = simulate(plan.schedule, plan.placement, plan.costs.chunks(plan.partition), plan.costs)
    # the last stage finishes first: 2 F on the way, then 4 times F and BW
    assert timeline.reductions[2] == ((2, 14.0, 19.0),)
    assert timeline.reductions[0] == ((0, 18.0, 23.0),)


def test_reductions_of_a_device_follow_each_other():
    costs = CostModel(
        tuple(LayerCost(f"{i}", 1, 1, 1, parameter_bytes=b) for i, b in enumerate((2.0, 4.0))),
        reduction=Reduction(2, Link(0.0, 1.0)),
    )
    chunks = tuple(costs.chunk([i]) for i in range(2))
    schedule = Schedule.parse([["F0.0", "F1.0", "B1.0", "W1.0", "B0.0", "W0.0"]])
    timeline = simulate(schedule, Placement((0, 0), 1), chunks, costs)
    assert timeline.reductions == (((1, 4.0, 8.0), (0, 8.0, 10.0)),)
    assert timeline.spans == (10.0,)
    late = Schedule.parse([["F0.0", "F1.0", "B1.0", "B0.0", "W0.0", "W1.0"]])
    assert simulate(late, Placement((0, 0), 1), chunks, costs).step_time == 5 + 2 + 4


def test_without_replicas_nothing_changes():
    costs = CostModel(tuple(LayerCost(f"{i}", 1, 1, 1, parameter_bytes=1.0) for i in range(4)))
    alone = replace(costs, reduction=Reduction(1, Link(1.0, 1.0)))
    assert make_plan(alone, 2, 4, "zb-v").predicted == make_plan(costs, 2, 4, "zb-v").predicted


def test_the_search_finishes_chunks_early_where_reductions_are_long():
    """Two chunks on one device: the long reduction starts behind the work of the other chunk."""
    costs = CostModel(
        tuple(LayerCost(f"{i}", 1, 1, 1, 1.0, 1.0, parameter_bytes=b) for i, b in enumerate((0.0, 6.0))),
        reduction=Reduction(2, Link(0.0, 1.0)),
    )
    chunks = tuple(costs.chunk([i]) for i in range(2))
    result = search(Placement((0, 0), 1), chunks, costs, 3, effort=8)
    # W1.2 can stand as early as third from the end, before B0.2 and W0.2, or with W0 left behind even earlier
    assert result.value < 18 + 6
    timeline = simulate(result.schedule, Placement((0, 0), 1), chunks, costs)
    assert timeline.step_time == pytest.approx(result.value)


def late_reduction():
    """A problem and an order of it that is as good as any but for the reduction: chunk 1 ends last."""
    costs = CostModel(
        tuple(LayerCost(f"{i}", 1, 1, 1, parameter_bytes=b) for i, b in enumerate((0.0, 6.0))),
        reduction=Reduction(2, Link(0.0, 1.0)),
    )
    instance = build_instance(Placement((0, 0), 1), [costs.chunk([i]) for i in range(2)], costs, 2)
    schedule = Schedule.parse(
        [["F0.0", "F1.0", "B1.0", "B0.0", "W0.0", "F0.1", "F1.1", "B1.1", "B0.1", "W0.1", "W1.0", "W1.1"]]
    )
    return instance, from_schedule(instance, schedule)


def test_annealing_knows_the_reductions():
    instance, order = late_reduction()
    assert measure(instance, order) == 12 + 6
    found = anneal(instance, order, new_stream(0), 20_000, 0.1, 0.01, 0.1, 3.0, 0.6, 1.0)
    assert found == measure(instance, order) == 8 + 6  # W1.1 right after B1.1 and W1.0


def test_a_look_at_a_layout_counts_the_reductions():
    costs = with_reduction(CostModel(tuple(LayerCost(f"{i}", 1, 2, 1, 1.0, 0.5) for i in range(6))), bandwidth=0.25)
    scorer = Scorer(costs, 2, 6, 2.0)
    layout = Layout((2, 1, 3), (0, 1, 0), 2)
    value, schedule = scorer.quick_schedule(layout)
    chunks = costs.chunks(layout.partition)
    assert value == pytest.approx(simulate(schedule, layout.placement, chunks, costs).step_time)
    assert value > simulate(schedule, layout.placement, chunks, replace(costs, reduction=None)).step_time


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bounds_and_both_simulations_agree(data):
    num_devices = data.draw(st.integers(1, 3))
    placement = data.draw(st.sampled_from([cyclic(num_devices), cyclic(num_devices, 2)]))
    costs = with_reduction(
        data.draw(reference.cost_models(placement.num_chunks, num_devices)), 2, data.draw(st.sampled_from([0.3, 1.0, 10.0]))
    )
    m = data.draw(st.integers(1, 4))
    name = "zb" if placement.num_chunks > num_devices else data.draw(st.sampled_from(["1f1b", "zb-h1", "zb"]))
    plan = make_plan(costs, num_devices, m, name, memory_budget=8.0, placement=placement)
    chunks = costs.chunks(plan.partition)
    times = reference.run(plan.schedule, placement, chunks, costs)
    spans = []
    for d, order in enumerate(plan.schedule.orders):
        ends = sorted((times[p][1], p.chunk) for p in order if p.microbatch == m - 1 and "W" in p.kind.value)
        now = 0.0
        for end, chunk in ends:
            now = max(now, end) + costs.reduction_seconds(chunks[chunk])
        spans.append(max(now, times[order[-1]][1]) - times[order[0]][0])
        assert len(ends) == len(placement.chunks_of(d))
    assert plan.predicted.step_time == pytest.approx(max(spans))
    assert plan.predicted.bubble_rate >= -1e-12
    split = all(p.kind.value != "BW" for p in plan.schedule.passes())
    if split:
        instance = build_instance(placement, chunks, costs, m)
        assert measure(instance, from_schedule(instance, plan.schedule)) == pytest.approx(plan.predicted.step_time)
    for objective, value in (
        (Objective.STEP_TIME, plan.predicted.step_time),
        (Objective.MAKESPAN, plan.predicted.makespan),
        (Objective.PERIOD, plan.predicted.period),
    ):
        for bound in bounds_of_orders(placement, chunks, costs, m, [np.inf] * num_devices, objective):
            assert bound.seconds <= value * (1 + 1e-9) + 1e-9, (objective, bound)
