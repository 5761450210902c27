"""The plan that a run starts with."""

from __future__ import annotations

import pytest

from lightning_zb.model.layers import find_layers
from lightning_zb.plan_choice import PlanRequest, choose_plan
from lightning_zb.replanning import Replan
from tests.lightning.models import MODELS


@pytest.mark.parametrize(
    ("budget", "provisional", "limit"),
    [
        (1.5, True, 0.75),
        (1.5, False, 1.5),
        ("2MiB", True, 0.5),
        ("2MiB", False, 0.5),
        ([1.0, "1GiB"], True, None),
        (0.55, True, None),
    ],
)
def test_a_first_plan_keeps_clear_of_the_budget(budget, provisional: bool, limit: float | None):
    """Assumed bytes: half the budget, or the least that runs."""
    module = MODELS["tokens"]()
    stack = find_layers(module, None)
    replan = Replan.ORDER if provisional else Replan.OFF
    request = PlanRequest(schedule="zb-v", memory_budget=budget, partition="even", costs=None, replan=replan)
    chosen = choose_plan(request, module, stack, 2, 8, lambda value: value, True).plan
    whole = chosen.costs.activation_bytes
    if limit is not None:
        assert chosen.memory_limit == (limit * whole, limit * whole)
    assert max(chosen.predicted.peak_bytes) <= (budget if isinstance(budget, float) else 1.0) * whole


@pytest.mark.parametrize("replan", [Replan.OFF, Replan.ORDER, Replan.PLACEMENT])
def test_a_search_that_may_begin_again_starts_as_zb_v(replan: Replan):
    """Nothing is searched with assumed costs where a search with measured ones may change everything."""
    module = MODELS["tokens"]()
    request = PlanRequest(schedule="auto", memory_budget=None, partition=None, costs=None, replan=replan)
    chosen = choose_plan(request, module, find_layers(module, None), 2, 8, lambda value: value, True).plan
    assert chosen.planner.name == ("zb-v" if replan is Replan.PLACEMENT else "auto")
    assert max(chosen.predicted.peak_bytes) <= chosen.costs.activation_bytes
