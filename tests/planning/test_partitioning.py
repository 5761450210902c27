from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.planning.partitioning import make_partition
from lightning_zb.planning.placement import Placement, cyclic, wave


def model(works, ends=False, speeds=None):
    layers = [LayerCost(f"{i}", w, 0, 0) for i, w in enumerate(works)]
    if ends:
        layers = [
            LayerCost("embedding", 0, 0, 1, role=LayerRole.PROLOGUE),
            *layers,
            LayerCost("head", 5, 5, 5, role=LayerRole.EPILOGUE),
        ]
    return CostModel(tuple(layers), device_speed=speeds)


def counts(partition):
    return [len(chunk) for chunk in partition.chunks]


def test_even_gives_the_remainder_to_the_middle():
    assert counts(make_partition("even", model([1] * 6), cyclic(4))) == [1, 2, 2, 1]
    assert counts(make_partition("even", model([1] * 9), wave(2, 2))) == [2, 3, 2, 2]
    assert counts(make_partition("even", model([1] * 4, ends=True), cyclic(2))) == [3, 3]


def test_too_few_layers():
    with pytest.raises(ValueError, match="4 chunks need at least 4 layers, the model has 3"):
        make_partition("even", model([1] * 3, ends=True), cyclic(4))


def test_counts_cover_the_stack_or_everything():
    costs = model([1] * 4, ends=True)
    assert counts(make_partition([1, 3], costs, cyclic(2))) == [2, 4]
    assert counts(make_partition([1, 5], costs, cyclic(2))) == [1, 5]
    with pytest.raises(ValueError, match="covers 5 layers; write counts that add up to 4 layers"):
        make_partition([2, 3], costs, cyclic(2))
    with pytest.raises(ValueError, match="has 3 chunks, the placement has 2"):
        make_partition([1, 1, 2], costs, cyclic(2))
    with pytest.raises(ValueError, match="'fair' is unknown"):
        make_partition("fair", costs, cyclic(2))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_balanced_is_best_by_brute_force(data):
    works = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=8))
    devices = data.draw(st.permutations([0, 1, data.draw(st.integers(0, 1))]))
    speeds = data.draw(st.sampled_from([None, (1.0, 2.0)]))
    costs, placement = model(works, speeds=speeds), Placement(tuple(devices), 2)

    def largest(ends):
        return max(sum(works[a:b]) / costs.speed(d) for a, b, d in zip((0, *ends), (*ends, len(works)), devices, strict=True))

    best = min(largest(ends) for ends in combinations(range(1, len(works)), 2))
    sizes = counts(make_partition("balanced", costs, placement))
    assert largest((sizes[0], sizes[0] + sizes[1])) == best
