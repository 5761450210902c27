"""The second paper's performance model, device by device."""

from __future__ import annotations

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.performance import device_performance
from lightning_zb.planning.planner import make_plan
from recipes.costs.random_cases import random_case


def test_two_devices_by_hand():
    """F0 0..1, transfer 1..1.5, F1 1.5..2.5, BW1 2.5..4.5, transfer 4.5..5, BW0 5..7."""
    layer = LayerCost("layer", 1.0, 1.0, 1.0, activation_bytes=3.0, parameter_bytes=5.0, state_bytes=20.0)
    plan = make_plan(CostModel((layer, layer), Link(0.5)), 2, 1, "1f1b")
    first, second = device_performance(plan)
    assert (first.runtime, first.computation, first.communication) == (7.0, 3.0, 0.5)
    assert (first.bubble, first.overlap) == (3.5, 0.0)
    assert (second.runtime, second.bubble, second.communication) == (3.0, 0.0, 0.0)
    assert (first.activation_bytes, first.gradient_bytes, first.constant_bytes) == (3.0, 5.0, 20.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_runtime_is_computation_and_bubbles_without_what_overlaps(name, seed):
    case = random_case(seed)
    plan = make_plan(case.costs, case.num_devices, case.num_microbatches, name)
    figures = device_performance(plan)
    for d in figures:
        assert d.runtime == pytest.approx(d.computation + d.communication + d.bubble - d.overlap)
        assert d.bubble >= -1e-12
        assert d.overlap <= d.communication + 1e-12
    assert max(d.runtime for d in figures) == pytest.approx(plan.predicted.step_time)
    assert [d.activation_bytes for d in figures] == pytest.approx(plan.predicted.peak_bytes)
