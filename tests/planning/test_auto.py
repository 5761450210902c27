"""schedule auto: the placement follows memory, nothing by name is better, and budgets that nothing fits are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.auto import candidate_placements
from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.costs import CostModel, LayerCost, Link, PassOverhead
from lightning_zb.planning.plan import PlanStatus
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import find_schedule
from tests.planning.paper import ROWS
from tests.planning.reference import cost_models


def costs(num_devices, layers_per_device=4, link=0.527, times=(29.718, 29.444, 19.927), sizes=(303104.0, 131072.0)):
    """Qi et al. (ICLR 2024), Table 6, 6.2B: a stage split evenly over layers; milliseconds."""
    v = layers_per_device
    layer = LayerCost("layer", *(t / v for t in times), *(s / v for s in sizes))
    return CostModel((layer,) * (num_devices * v), Link(link))


def test_placements_follow_the_layers():
    assert list(candidate_placements(4, 4)) == ["sequential"]
    assert list(candidate_placements(4, 8)) == ["sequential", "wave-2", "cyclic-2"]
    assert list(candidate_placements(1, 8)) == ["sequential"]
    assert {"wave-6", "cyclic-5"} <= set(candidate_placements(4, 24))


@pytest.mark.parametrize("budget", [0.5, 0.625, 1.0, 1.25, 2.0])
def test_never_worse_than_any_v(budget):
    model = costs(8)
    ours = make_plan(model, 8, 24, "auto", budget, effort=4)
    assert max(ours.predicted.peak_bytes) <= budget * model.activation_bytes * (1 + 1e-9)
    for name in ("zb-v", "v-half", "v-min"):
        try:
            theirs = make_plan(model, 8, 24, name, budget)
        except InfeasibleBudget:
            continue
        assert ours.predicted.step_time <= theirs.predicted.step_time * (1 + 1e-9), name


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_more_memory_is_never_worse(data):
    """By eighths of the whole model's activations, cut evenly; small problems of unequal layers, devices and links."""
    num_devices = data.draw(st.integers(1, 3))
    model = data.draw(cost_models(data.draw(st.integers(num_devices, 2 * num_devices)), num_devices))
    num_microbatches = data.draw(st.integers(1, 5))
    eighths = data.draw(st.lists(st.integers(2, 20), min_size=2, max_size=3, unique=True).map(sorted))
    before = np.inf
    for eighth in eighths:
        try:
            plan = make_plan(model, num_devices, num_microbatches, "auto", eighth / 8, partition="even", effort=2)
        except InfeasibleBudget:
            assert before == np.inf
            continue
        assert plan.predicted.step_time <= before * (1 + 1e-9)
        before = plan.predicted.step_time


@pytest.mark.parametrize("eighths", [4, 8, 12, 16])
@pytest.mark.parametrize("partition", ["even", "auto"])
def test_what_a_w_takes_besides_its_layers_is_saved_where_memory_allows_to_put_it_off(eighths, partition):
    """One device: B and W apart take 1.6 s a microbatch, a whole backward saves the 0.1 s that a W takes besides its layers."""
    model = CostModel((LayerCost("layer", 0.5, 0.0, 0.5, 0.5, 0.2),), Link(0.0), overhead=PassOverhead(0.3, 0.2, 0.1))
    plan = make_plan(model, 1, 2, "auto", eighths / 4, partition=partition, effort=2)
    assert plan.predicted.step_time == pytest.approx(2 * (0.5 + 0.3 + 0.5 + 0.2))


@pytest.mark.parametrize("budget", [3 / 8, 9 / 16])
def test_never_worse_than_the_public_ones_at_their_own_peak(budget):
    """Sixteen devices: v-min holds 6 and v-half 9 M_B there."""
    row = ROWS[6]
    plan = make_plan(row.costs(4), row.num_devices, row.num_microbatches, "auto", budget, effort=0)
    assert plan.predicted.bubble_rate <= row.bubbles["v-min" if budget < 0.5 else "v-half"] + 1e-6


def test_waves_at_the_memory_of_1f1b_and_the_reason_names_the_bound():
    plan = make_plan(costs(8), 8, 24, "auto", 1.0, effort=4)
    assert plan.placement.num_chunks > 16
    assert "bound on device" in plan.planner.reason
    assert plan.predicted.lower_bound <= plan.predicted.step_time
    assert plan.predicted.bubble_rate < 0.02  # zb-v: 0.0403


def test_twice_the_memory_is_proved_optimal_without_search():
    plan = make_plan(costs(8), 8, 24, "auto", 2.0)
    assert plan.predicted.bubble_rate == pytest.approx(0.0, abs=1e-9)
    assert plan.planner.status is PlanStatus.OPTIMAL


def test_few_microbatches_beat_the_public_heuristics():
    plan = make_plan(costs(8, 6), 8, 8, "auto", 1.0, effort=2)
    assert plan.predicted.bubble_rate < 0.1  # zb-v 0.156; zb 0.308


def test_one_device_needs_no_bubble():
    assert make_plan(costs(1), 1, 3, "auto").predicted.bubble_rate == pytest.approx(0.0, abs=1e-12)


def test_a_budget_that_nothing_fits_names_the_smallest():
    with pytest.raises(InfeasibleBudget, match="smallest that fits"):
        make_plan(costs(4), 4, 8, "auto", 0.1)


def test_more_effort_is_never_worse():
    values = [make_plan(costs(4), 4, 8, "auto", 0.75, effort=e).predicted.step_time for e in (0, 4, 12, 28)]
    assert values == sorted(values, reverse=True)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="speed"):
        make_plan(costs(2), 2, 2, "auto", speed=3)


def test_auto_is_registered():
    assert find_schedule("auto").name == "auto"


@pytest.mark.parametrize("partition", [None, "even"])
def test_a_list_of_budgets_has_one_entry_for_each_device(partition: str | None):
    costs = CostModel(tuple(LayerCost(str(i), 1.0 + i % 3, 1.0, 1.0, 1.0, 0.5) for i in range(8)))
    for budget in ([1.0], [1.0, 2.0, 3.0], [1.0, "1GiB", 1.0]):
        with pytest.raises(ValueError, match=f"has {len(budget)} entries for 2 devices"):
            make_plan(costs, 2, 4, "auto", budget, partition)
