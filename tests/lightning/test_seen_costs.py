"""Costs as passes show them: each chunk's passes take what was seen, layers keep their shares of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_zb
from lightning_zb.planning.costs import CostModel, LayerCost, PassOverhead
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.timeline import predict_with
from lightning_zb.replanning import repriced
from lightning_zb.seen_costs import seen_costs

LAYERS = tuple(LayerCost(f"layers.{i}", 1.0 + i, 2.0, 0.5 + i, 1.0, 0.5, backward=2.0 + i) for i in range(8))
COSTS = CostModel(LAYERS, device_speed=(1.0, 2.0), overhead=PassOverhead(0.25, 0.125))
PLAN = make_plan(COSTS, 2, 8, "zb-v")
KINDS = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "whole_backward"}


def _takes(costs: CostModel) -> dict[tuple[int, str], float]:
    chunks = enumerate(zip(costs.chunks(PLAN.partition), PLAN.placement.devices, strict=True))
    return {(c, kind): getattr(cost, name) / costs.speed(d) for c, (cost, d) in chunks for kind, name in KINDS.items()}


@given(st.dictionaries(st.sampled_from(sorted(_takes(COSTS))), st.floats(1.0, 100.0)))
def test_passes_take_what_was_seen(seen):
    costs = seen_costs(PLAN, seen)
    found, planned = _takes(costs), _takes(COSTS)
    for key, seconds in seen.items():
        assert found[key] == pytest.approx(seconds)
    for chunk, items in enumerate(PLAN.partition.chunks):
        kinds = {kind for c, kind in seen if c == chunk}
        if "F" not in kinds:
            assert found[chunk, "F"] == pytest.approx(planned[chunk, "F"])
        if not kinds & {"B", "W", "BW"}:
            assert found[chunk, "BW"] == pytest.approx(planned[chunk, "BW"])
        assert costs.layers[items[0]].forward * LAYERS[items[-1]].forward == pytest.approx(
            costs.layers[items[-1]].forward * LAYERS[items[0]].forward
        )
    without = dict.fromkeys(("forward", "backward_input", "backward_weight", "backward"), 0.0)
    assert [replace(c, **without) for c in costs.layers] == [replace(c, **without) for c in LAYERS]
    assert (costs.overhead, costs.device_speed, costs.link) == (COSTS.overhead, COSTS.device_speed, COSTS.link)


def test_what_did_not_run_is_scaled_like_what_did():
    planned = _takes(COSTS)
    whole = _takes(seen_costs(PLAN, {(0, "BW"): 3 * planned[0, "BW"] - 2 * 0.125}))  # the overhead does not grow
    assert whole[0, "B"] == pytest.approx(3 * planned[0, "B"] - 2 * 0.125)
    assert whole[0, "W"] == pytest.approx(3 * planned[0, "W"])
    apart = _takes(seen_costs(PLAN, {(0, "B"): 2 * planned[0, "B"] - 0.125, (0, "W"): 2 * planned[0, "W"]}))
    assert apart[0, "BW"] == pytest.approx(2 * planned[0, "BW"] - 0.125)


def test_a_whole_backward_that_nobody_saw_stays_unknown():
    plan = replace(PLAN, costs=replace(COSTS, layers=tuple(replace(layer, backward=None) for layer in LAYERS)))
    apart = seen_costs(plan, {(0, "B"): 9.0, (0, "W"): 1.0})
    assert all(layer.backward is None for layer in apart.layers)
    whole = seen_costs(plan, {(0, "BW"): 9.0})
    assert {layer.backward is None for layer in (whole.layers[i] for i in PLAN.partition.chunks[0])} == {False}


@pytest.mark.parametrize(
    ("slower", "replan", "thinks"),
    [({0: 1.5}, "order", [True, False]), ({0: 1.5}, "off", [False] * 2), ({}, "order", [False] * 2)],
)
def test_the_plan_is_predicted_again_and_reconsidered_once(slower, replan, thinks, monkeypatch):
    """Where a device waits more than planned since another is slower; and no more than once."""
    monkeypatch.setattr("lightning_zb.callback.Deliberation", lambda *_, **__: "a deliberation")
    callback = lightning_zb.ZeroBubbleCallback(replan=replan, report=False)
    pipeline = SimpleNamespace(plan=PLAN, channels="some", ending=None, joins_ends=False, device=torch.device("cpu"))
    pipeline.request = SimpleNamespace(schedule="zb-v", memory_budget=None, constraints=None)
    pipeline.switch = lambda plan: setattr(pipeline, "plan", plan)
    strategy = SimpleNamespace(broadcast=lambda value: value, everyone=None)
    trainer = SimpleNamespace(strategy=strategy, global_step=9, is_global_zero=True)
    callback._may_think_again, callback.profile = True, SimpleNamespace(items=(), peak_bytes=(1.0, 1.0))
    seconds = _takes(COSTS)
    for expected in thinks:
        seconds = {(c, kind): s * slower.get(c, 1.0) for (c, kind), s in seconds.items()}
        found = lightning_zb.callback.Profile(None, (), None, {}, seconds, (0.0, 0.0), False)
        callback._deliberation = None
        callback._verify(trainer, pipeline, found)
        assert pipeline.plan.predicted == predict_with(PLAN, pipeline.plan.costs)
        assert _takes(pipeline.plan.costs) == pytest.approx(seconds)
        assert (callback._deliberation is not None) is expected
    assert [d.change for d in callback.decisions] == ["costs"] * (len(thinks) if slower else 0)


def test_bytes_and_limits_stay():
    priced = repriced(PLAN, seen_costs(PLAN, {(0, "F"): 9.0}), 2.0)
    before = repriced(PLAN, COSTS, 2.0)
    assert priced.memory_limit == before.memory_limit
    assert priced.predicted.peak_bytes == before.predicted.peak_bytes
