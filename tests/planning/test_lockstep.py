"""Rounds of a B and an F on a V: complete orders within every limit, and no worse than the public scheduler of zb-v."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.builders.greedy import order_offsets, smallest_limits
from lightning_zb.planning.builders.lockstep import lockstep_orders
from lightning_zb.planning.costs import ChunkCost, CostModel, Link
from lightning_zb.planning.placement import cyclic, wave
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.simulation import tabulate
from tests.planning import reference
from tests.planning.paper import ROWS


def orders_of(problem):
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    return [table.decode(order, order_offsets(problem)) for order in lockstep_orders(problem, table)]


@st.composite
def problems(draw):
    num_devices = draw(st.integers(1, 5))
    times, sizes = st.sampled_from([0.0, 0.5, 1.0, 1.3, 2.0]), st.sampled_from([0.0, 0.4, 1.0, 2.5])
    chunks = tuple(ChunkCost(draw(times), draw(times), draw(times), draw(sizes), draw(sizes)) for _ in range(2 * num_devices))
    costs = CostModel((), Link(draw(st.sampled_from([0.0, 0.1, 2.0]))))
    problem = Problem(wave(num_devices, 2), chunks, costs, draw(st.integers(1, 9)), (np.inf,) * num_devices)
    limits = tuple(need * draw(st.sampled_from([1.0, 1.5, 3.0, np.inf])) if need else 0.0 for need in smallest_limits(problem))
    return Problem(problem.placement, chunks, costs, problem.num_microbatches, limits)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_orders_are_complete_and_within_the_limits(problem):
    for schedule in orders_of(problem):
        schedule.check(problem.placement)
        assert reference.ascending(schedule)
        reference.run(schedule, problem.placement, problem.chunk_costs, problem.costs)
        peaks = reference.peaks(schedule, problem.placement, problem.chunk_costs)
        assert all(peak <= limit + 1e-6 for peak, limit in zip(peaks, problem.limits, strict=True))


def test_equal_chunks_have_orders_from_the_memory_of_1f1b_on():
    chunks, costs = (ChunkCost(1.0, 1.0, 1.0, 0.5, 0.2),) * 12, CostModel(())
    assert orders_of(Problem(wave(6, 2), chunks, costs, 12, (6.0,) * 6))
    assert not orders_of(Problem(wave(6, 2), chunks, costs, 12, (5.0,) * 6))  # the first way through the V holds 6
    assert not orders_of(Problem(cyclic(6, 2), chunks, costs, 12, (12.0,) * 6))


# the authors' public scheduler on the costs of the first paper at 1.25 and 1.5
@pytest.mark.parametrize(
    ("number", "at_125", "at_150"), [(0, 0.0331, 0.0128), (2, 0.0158, 0.0057), (5, 0.0062, 0.0024), (7, 0.0138, 0.0027)]
)
def test_zb_v_with_more_memory_is_at_or_below_the_public_one(number, at_125, at_150):
    row = ROWS[number]
    for budget, public in ((1.25, at_125), (1.5, at_150)):
        plan = make_plan(row.costs(2), row.num_devices, row.num_microbatches, "zb-v", memory_budget=budget)
        assert round(plan.predicted.bubble_rate, 4) <= public
