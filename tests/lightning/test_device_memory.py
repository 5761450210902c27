"""Budgets at run time: what a device has left, what it allocated, what it holds beside activations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_zb.device_memory import excess, free_bytes, held_too_much, settled_budget
from lightning_zb.drift import find_drift
from lightning_zb.model.layer_costs import ItemProfile, at_unit_speed, cost_model, item_sizes
from lightning_zb.model.layers import find_layers
from lightning_zb.plan_choice import PlanRequest
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planner import make_plan
from lightning_zb.profile_window import Profile
from tests.lightning.known_costs import EQUAL
from tests.lightning.models import MODELS


def test_a_size_is_held_against_all_that_a_device_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30 + 1)

    def found(budget, device: str = "cuda") -> str | None:
        request = PlanRequest(schedule="zb-v", memory_budget=budget, partition="even", costs=None)
        return excess(SimpleNamespace(request=request, device=torch.device(device), devices=(1,)))

    assert "device 1 allocated 1.00 GiB in all, more than its memory_budget '1GiB'" in (found(["2GiB", "1GiB"]) or "")
    assert found("1GiB") is not None
    assert found("2GiB") is found(1.5) is found(None) is found([1.0, 1.0]) is found("1GiB", "cpu") is None


def test_what_is_held_beside_activations_counts():
    """Parameters, gradients, Adam's moments; a copy to roll back to; gradients of tied parameters that wait."""
    module = MODELS["tokens"]()
    stack = find_layers(module, None)
    optimizer = torch.optim.AdamW(module.parameters())
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    layer = list(stack.modules[0].parameters())
    size, steps = sum(p.numel() * 4 for p in layer), 4 * len(layer)
    own = dict.fromkeys(layer, 3)
    plain = item_sizes(stack, layer, {}, [optimizer])[1]
    assert plain == (size, 4 * size + steps)
    assert item_sizes(stack, layer, {}, [optimizer], copied=True)[1] == (size, 7 * size + 2 * steps)
    assert item_sizes(stack, layer, {}, [optimizer], parts=own)[1] == (size, 7 * size + steps)


def test_costs_are_those_of_a_device_of_speed_one():
    """A layer that took 4 s on a device of speed 0.5 is one of 2 s, and its chunk is planned with 4 s there again."""
    measured = [(0, 4.0, 0.5), (1, 2.0, 1.5)]
    items = [at_unit_speed(ItemProfile(i, LayerCost(str(i), s, s, s), (s, s, s), 1), speed) for i, s, speed in measured]
    model = cost_model(items, Link(), (0.5, 1.5))
    assert [layer.forward for layer in model.layers] == [2.0, 3.0]
    assert items[0].high == (2.0, 2.0, 2.0)
    plan = make_plan(model, 2, 4, "1f1b")
    assert plan.predicted.busy == pytest.approx((4 * 12.0, 4 * 6.0))
    assert find_drift(plan, {(c, part): s for c, s, _ in measured for part in "FBW"}, 0.01) is None


def test_what_a_device_has_left_becomes_the_budget(monkeypatch: pytest.MonkeyPatch):
    """CUDA: what is free or only reserved, less a tenth and the largest workspace; a CPU has no limit."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda")) == 900
    assert free_bytes(torch.device("cpu")) is None
    model = CostModel(tuple(replace(layer, workspace_bytes={"F": 100.0}) for layer in EQUAL.layers))
    plan = make_plan(model, 2, 8, "zb", 2.0)
    profile = Profile(model, (), None, {}, {}, (), False)
    request = PlanRequest(schedule="zb-v", memory_budget=None, partition="even", costs=None)
    pipeline = SimpleNamespace(plan=plan, request=request, device=torch.device("cuda"), devices=(0, 1), channels=None)
    assert settled_budget(pipeline, profile) == [800 / model.activation_bytes] * 2
    pipeline.request = replace(request, memory_budget=1.5)
    assert settled_budget(pipeline, profile) == 1.5
    pipeline.request = replace(request, schedule="zb-2p")
    assert settled_budget(pipeline, profile) is None  # the schedule's name says its budget
    pipeline.device = torch.device("cpu")
    assert settled_budget(pipeline, profile) is None


def test_too_much_is_said_in_sizes_that_make_sense():
    plan = replace(make_plan(EQUAL, 2, 8, "zb", 2.0), memory_limit=(4096.0, -5.0))
    first, second = held_too_much(plan, (8192.0, 1024.0))
    assert first.startswith(
        "device 0 held 8.0 KiB of activations, more than the 4.0 KiB that its memory budget leaves; predicted"
    )
    assert "1.0 KiB of activations, more than nothing that its memory budget leaves beside model states and workspace" in second
