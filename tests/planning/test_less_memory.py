"""The ladder of memory levels: all within the limits, and a larger limit tries all that a smaller one does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_zb.planning.budget import InfeasibleBudget, fits
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.less_memory import ladder, smaller_budgets
from lightning_zb.planning.placement import Placement, wave
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import Problem
from tests.planning import reference
from tests.planning.paper import unit_costs

quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def pairs(draw):
    """The same problem twice, every device with as many bytes more the second time."""
    devices = draw(reference.placements())
    placement = Placement(tuple(devices), max(devices) + 1)
    sizes = st.sampled_from([0.5, 1.0, 1.0, 2.0])
    chunks = tuple(ChunkCost(1.0, 1.0, 1.0, draw(sizes), draw(st.sampled_from([0.0, 0.4, 1.0, 3.0]))) for _ in devices)
    problem = Problem(placement, chunks, CostModel(()), 4, (float("inf"),) * placement.num_devices)
    least = smallest_limits(problem)
    room = [need + draw(st.floats(0.0, 20.0)) for need in least]
    more = draw(st.floats(0.0, 20.0))
    return [Problem(placement, chunks, CostModel(()), 4, tuple(r + extra for r in room)) for extra in (0.0, more)]


@quick
@given(pairs())
def test_more_room_tries_all_that_less_room_does(problems):
    small, large = ([level.limits for level in ladder(problem)] for problem in problems)
    assert all(any(limits == pytest.approx(tried) for tried in large) for limits in small)


@quick
@given(pairs())
def test_levels_are_within_the_limits_and_allow_an_order(problems):
    least = smallest_limits(problems[0])
    for problem in problems:
        levels = list(ladder(problem))
        assert levels[-1].limits == least
        for level in levels:
            assert all(a <= b <= c * (1 + 1e-9) for a, b, c in zip(least, level.limits, problem.limits, strict=True))
        assert all(a.limits != b.limits and a.budget > b.budget for a, b in pairwise(levels))


@quick
@given(pairs(), st.integers(1, 20))
def test_a_smaller_budget_has_the_limits_that_it_has_alone(problems, eighths):
    """Also which devices cannot keep it is the same."""
    problem = problems[1]
    whole = sum(c.activation_bytes for c in problem.chunk_costs)
    uniform = Problem(problem.placement, problem.chunk_costs, problem.costs, 4, (3.0 * whole,) * problem.placement.num_devices)
    if not fits(smallest_limits(uniform), uniform.limits):
        return
    found = [level.limits for level in smaller_budgets(uniform) if level.budget == eighths / 8]
    asked = (eighths / 8 * whole,) * problem.placement.num_devices
    assert found == ([pytest.approx(asked)] if fits(smallest_limits(uniform), asked) and eighths in (*range(1, 17), 20) else [])


def test_every_chunk_that_fits_counts():
    problem = Problem(wave(8, 2), (ChunkCost(1, 1, 1, 0.5, 0.5),) * 16, CostModel(()), 8, (6.5,) * 8)
    assert next(ladder(problem)).limits == (6.5,) * 8
    unlimited = Problem(wave(8, 2), (ChunkCost(1, 1, 1, 0.5, 0.5),) * 16, CostModel(()), 8, (float("inf"),) * 8)
    assert next(ladder(unlimited)).limits == (float("inf"),) * 8


@pytest.mark.parametrize("name", ["zb", "zb-v", "wave-3"])
@settings(quick, max_examples=8)
@given(data=st.data())
def test_more_memory_is_never_worse(name, data):
    """Any costs, backwards split or whole; budgets as numbers or as sizes of the whole device."""
    num_devices, num_microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    costs = data.draw(reference.cost_models(3 * num_devices, num_devices))
    budgets = st.floats(0.1, 4.0) if data.draw(st.booleans()) else st.integers(1, 60).map("{}B".format)
    chosen = data.draw(st.lists(budgets, min_size=2, max_size=4, unique=True))
    before = float("inf")
    for budget in sorted(chosen, key=lambda b: float(str(b).removesuffix("B"))):
        try:
            plan = make_plan(costs, num_devices, num_microbatches, name, memory_budget=budget)
        except InfeasibleBudget:
            assert before == float("inf")
            continue
        assert plan.predicted.step_time <= before * (1 + 1e-8)
        before = plan.predicted.step_time


def test_one_more_m_b_of_a_stage_is_never_worse():
    """Appendix B of the first paper counts by M_B, up to 3 P."""
    costs = unit_costs(8)
    times = [make_plan(costs, 8, 32, "zb", memory_budget=k / 8).predicted.step_time for k in range(4, 27)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))
    assert times[-1] == pytest.approx(96.0)
