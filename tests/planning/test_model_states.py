"""Bytes of a parameter, by optimizer, precision and post-validation."""

from __future__ import annotations

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.model_states import model_states, with_model_states


@pytest.mark.parametrize(
    ("optimizer", "precision", "exact", "total"),
    [
        ("sgd", "fp32", False, 8),
        ("momentum", "fp32", False, 12),
        ("adam", "fp32", False, 16),
        ("adamw", "bf16-mixed", False, 18),
        ("adamw", "16-mixed", False, 18),
        ("adamw", "bf16-true", False, 8),
        ("sgd", "fp32", True, 12),
        ("adamw", "fp32", True, 28),
    ],
)
def test_bytes_of_a_parameter(optimizer, precision, exact, total):
    assert model_states(optimizer, precision, exact).total == total


def test_replicas_divide_optimizer_state_and_its_copy():
    whole, shared = model_states("adamw", exact_post_validation=True), model_states("adamw", "fp32", True, num_shards=4)
    assert (whole.optimizer, shared.optimizer) == (8, 2)
    assert (whole.rollback, shared.rollback) == (12, 6)
    assert whole.total - shared.total == 12
    with pytest.raises(ValueError, match="num_shards=0 must be at least 1"):
        model_states("adamw", num_shards=0)


def test_items_get_states_in_proportion_to_their_parameters():
    costs = CostModel((LayerCost("a", 1, 1, 1, parameter_bytes=40.0), LayerCost("b", 1, 1, 1)))
    assert [c.state_bytes for c in with_model_states(costs, "adamw").layers] == [160.0, 0.0]
    assert with_model_states(costs, "adamw", bytes_of_parameter=2.0).layers[0].state_bytes == 320.0
    assert with_model_states(costs, "adamw", num_shards=2).layers[0].state_bytes == 120.0


@pytest.mark.parametrize("arguments", [("adagrad",), ("adam", "fp8")])
def test_what_is_unknown_is_named(arguments):
    with pytest.raises(ValueError, match="is unknown; known are"):
        model_states(*arguments)
