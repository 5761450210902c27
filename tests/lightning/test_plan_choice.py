"""The plan that a run starts with."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import lightning.pytorch as pl
import pytest

import lightning_zb
from lightning_zb import plan_choice
from lightning_zb.model.layers import find_layers
from lightning_zb.plan_choice import PlanRequest, Replan, choose_plan
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


def test_a_size_that_parameters_and_gradients_exceed_is_refused():
    """On two devices together, however they are divided; 32 bits of each number, or 16 where precision makes them so."""
    module = MODELS["tokens"]()
    numbers = sum(2 * p.numel() for p in module.parameters())
    for halves, more in product((False, True), (1, -1)):
        request = PlanRequest(
            schedule="zb-v", memory_budget=f"{numbers * (2 if halves else 4) / 2 + more}B", partition=None, costs=None,
            replan=Replan.ORDER, halves_parameters=halves,
        )  # fmt: skip
        with (
            nullcontext() if more > 0 else pytest.raises(ValueError, match="does not fit: parameters and gradients alone take")
        ):
            choose_plan(request, module, find_layers(module, None), 2, 8, lambda value: value, True)


def test_who_waits_for_compilation_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(plan_choice, "is_compiled", lambda: False)
    monkeypatch.setattr(plan_choice, "rank_zero_info", told.append)
    module = MODELS["tokens"]()
    request = PlanRequest(schedule="1f1b", memory_budget=None, partition=None, costs=None)
    choose_plan(request, module, find_layers(module, None), 2, 8, lambda value: value, True)
    assert [text.partition(",")[0] for text in told] == ["zero_bubble: compiling the planner's loops"]


@pytest.mark.parametrize("budget", ["lots", "1.5", [1.0, "x"], -1.0, [0.0, 1.0]])
def test_what_is_no_budget_is_refused_at_once(budget):
    with pytest.raises(ValueError, match=r"is not a size; write for example|must be positive; 1\.0 is"):
        lightning_zb.ZeroBubbleStrategy(memory_budget=budget)


def test_a_list_of_budgets_is_counted_once_the_devices_are_known():
    """With the strategy for devices of one process, with the Trainer for processes, which have not started then."""
    with pytest.raises(ValueError, match=r"memory_budget \[1\.0, 2\.0\] has 2 entries for 4 devices"):
        lightning_zb.ZeroBubbleStrategy(memory_budget=[1.0, 2.0], virtual_devices=4)
    strategy = lightning_zb.ZeroBubbleStrategy(memory_budget=[1.0, 2.0, 1.0], data_parallel_size=2)
    with pytest.raises(ValueError, match=r"memory_budget \[1\.0, 2\.0, 1\.0\] has 3 entries for 2 devices"):
        pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)


@pytest.mark.parametrize("schedule", ["auto", "zb-v"])
def test_a_budget_has_one_entry_for_each_device(schedule: str):
    """The message has what was written, not what the cautious first plan makes of it."""
    module = MODELS["tokens"]()
    request = PlanRequest(schedule=schedule, memory_budget=[1.0, 2.0], partition=None, costs=None, replan=Replan.PLACEMENT)
    with pytest.raises(ValueError, match=r"memory_budget \[1\.0, 2\.0\] has 2 entries for 4 devices"):
        choose_plan(request, module, find_layers(module, None), 4, 8, lambda value: value, True)
