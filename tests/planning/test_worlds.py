"""Data-parallel and pipeline sizes at an equal global batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, Link, Reduction
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.worlds import worlds


def model(parameter_bytes, num_layers=8, link=Link(0.0, 1e9)):  # noqa: B008 (frozen)
    layer = LayerCost("layer", 1.0, 1.0, 1.0, activation_bytes=1.0, parameter_bytes=parameter_bytes)
    return CostModel((layer,) * num_layers, link)


def plan(costs, num_devices, num_microbatches, budget=None):
    return make_plan(costs, num_devices, num_microbatches, "1f1b", budget)


def test_small_models_are_replicated_and_large_ones_cut():
    """By hand: D x P devices, 16 microbatches; 1f1b takes (16 / D + P - 1) x 24 / P seconds."""
    small = worlds(model(1e3), 8, 16, plan)
    assert [(w.num_replicas, w.num_devices) for w in small] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert small[0].seconds == pytest.approx(2 * 24, rel=1e-3)
    large = worlds(model(40e9), 8, 16, plan)
    assert (large[0].num_replicas, large[0].num_devices) == (1, 8)
    assert large[0].reduction == 0.0
    assert large[-1].reduction == pytest.approx(2 * 7 / 8 * 8 * 40, rel=1e-3)
    assert large[-1].plan.costs.reduction == Reduction(8, Link(0.0, 1e9))


def test_what_the_cool_down_hides_costs_nothing():
    """Two pipelines of four: the first device's gradients, ready last, are added after the step, 2 layers of 1.5 s each."""
    found = {w.num_devices: w for w in worlds(model(1.5e9), 8, 16, plan)}
    assert found[4].reduction == pytest.approx(3.0)
    assert found[4].seconds == pytest.approx((8 + 3) * 6 + 3.0, rel=1e-3)


def test_the_link_of_the_costs_own_reduction_counts():
    slow = replace(model(1e9), reduction=Reduction(3, Link(0.0, 1e8)))
    assert worlds(slow, 2, 4, plan)[-1].plan.costs.reduction == Reduction(2, Link(0.0, 1e8))


def test_a_split_that_cannot_be_says_why():
    found = worlds(model(1.0, num_layers=2), 4, 6, plan)
    refused = {(w.num_replicas, w.num_devices): w.refusal for w in found if w.plan is None}
    assert refused[4, 1] == "6 microbatches cannot be shared by 4 pipelines"
    assert "need at least 4 layers" in refused[1, 4]


def test_without_any_plan_every_reason_is_given():
    with pytest.raises(ValueError, match=r"1 x 4: .*need at least 4 layers"):
        worlds(model(1.0, num_layers=1), 4, 3, plan)


def test_links_by_pair_are_refused():
    costs = CostModel((LayerCost("layer", 1.0, 1.0, 1.0),), ((Link(), Link()), (Link(), Link())))
    with pytest.raises(ValueError, match="one link for all pairs"):
        worlds(costs, 2, 2, plan)
