"""Demands on cuts: read by name or index, contradictions named."""

from __future__ import annotations

import pytest

from lightning_zb.planning.cooptimize.cut_rules import CutRules, cut_rules, read_constraints
from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.placement import Partition

COSTS = CostModel(tuple(LayerCost(name, 1.0, 1.0, 1.0) for name in ("embedding", "mixer", "mlp", "mixer2", "head")))


def test_each_demand_becomes_cuts():
    assert cut_rules(COSTS, together=[("mixer", "mlp")]) == CutRules(frozenset({2}), frozenset())
    assert cut_rules(COSTS, together=[(0, 3)]) == CutRules(frozenset({1, 2, 3}), frozenset())
    assert cut_rules(COSTS, first=["mixer2", "embedding"]) == CutRules(frozenset(), frozenset({3}))
    assert cut_rules(COSTS, alone=["head", "mlp"]) == CutRules(frozenset(), frozenset({2, 3, 4}))


def test_a_partition_keeps_to_them_or_not():
    rules = cut_rules(COSTS, together=[("mixer", "mlp")], alone=["head"])
    assert rules.allows(Partition.from_counts([1, 3, 1]))
    assert not rules.allows(Partition.from_counts([2, 2, 1]))
    assert not rules.allows(Partition.from_counts([1, 4]))


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        ({"first": ["tail"]}, "'tail' is unknown; the items are embedding, mixer"),
        ({"first": [7]}, "item 7 is unknown; the 5 items count from 0"),
        ({"together": [("mixer", "mlp")], "alone": ["mlp"]}, "'mixer' and 'mlp' are to share a chunk and to be cut apart"),
    ],
)
def test_what_cannot_be_is_named(demands, message):
    with pytest.raises(ValueError, match=message):
        cut_rules(COSTS, **demands)


def test_a_name_of_two_items_is_refused():
    costs = CostModel((LayerCost("layer", 1.0, 1.0, 1.0),) * 3)
    with pytest.raises(ValueError, match="'layer' names 3 items; write its index"):
        cut_rules(costs, first=["layer"])


def test_constraints_are_read_from_plain_values():
    assert read_constraints(None, COSTS) == CutRules()
    constraints = {"together": [["mixer", "mlp"]], "alone": ["head"]}
    assert read_constraints(constraints, COSTS) == cut_rules(COSTS, together=[("mixer", "mlp")], alone=["head"])


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"last": ["head"]}, "constraint 'last' is unknown; there are 'together', 'first' and 'alone'"),
        ({"alone": "head"}, "constraint alone='head' is no list of items"),
        ({"together": ["mixer", "mlp"]}, r"constraint together=\['mixer', 'mlp'\] is no list of groups"),
        ({"together": "mixer"}, "constraint together='mixer' is no list of groups"),
    ],
)
def test_constraints_of_another_form_are_refused(constraints, message):
    with pytest.raises(ValueError, match=message):
        read_constraints(constraints, COSTS)
