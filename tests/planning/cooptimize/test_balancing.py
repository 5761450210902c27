"""Cuts that level the work of devices: against all cuts of small models, with demands, speeds and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.cooptimize.balancing import balance, make_loads
from lightning_zb.planning.cooptimize.cut_rules import CutRules
from lightning_zb.planning.cooptimize.layout import tidy
from lightning_zb.planning.costs import CostModel, LayerCost, PassOverhead

NO_RULES = CutRules()


def model(works, speeds=None, sizes=None):
    sizes = sizes or [1.0] * len(works)
    layers = tuple(LayerCost("item", w / 3, w / 3, w / 3, activation_bytes=s) for w, s in zip(works, sizes, strict=True))
    return CostModel(layers, device_speed=speeds)


def all_layouts(num_items, devices, num_devices):
    for inner in combinations(range(1, num_items), len(devices) - 1):
        yield tidy((0, *inner, num_items), devices, num_devices)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.3, 2.0, 5.0]), min_size=6, max_size=9), st.sampled_from([(0, 1, 2), (0, 1, 1, 0, 2)]))
def test_cuts_are_close_to_the_best_of_all(works, devices):
    loads = make_loads(model(works), 3, None, NO_RULES)
    found = balance(loads, devices)
    assert found is not None
    best = min(loads.of(other).max() for other in all_layouts(len(works), devices, 3))
    assert loads.of(found).max() <= 1.5 * best  # a local optimum
    assert sum(found.counts) == len(works)


def test_equal_layers_are_cut_evenly():
    loads = make_loads(model([1.0] * 16), 4, None, NO_RULES)
    assert balance(loads, (0, 1, 2, 3, 3, 2, 1, 0)).counts == (2,) * 8


def test_a_head_beyond_its_share_stays_alone_and_its_other_chunks_vanish():
    loads = make_loads(model([1.0] * 12 + [10.0]), 4, None, NO_RULES)
    found = balance(loads, (0, 1, 2, 3, 0, 1, 2, 3))
    assert found.counts[-1] == 1
    assert found.devices.count(3) == 1
    assert loads.of(found)[:3] == pytest.approx([4.0] * 3)


def test_a_slow_device_gets_less():
    loads = make_loads(model([1.0] * 10, speeds=(1.0, 1.0, 0.5)), 3, None, NO_RULES)
    assert balance(loads, (0, 1, 2)).counts == (4, 4, 2)


def test_each_chunk_adds_the_overhead_of_its_passes():
    """Two chunks of one device take it twice, so that the other device gets more items."""
    costs = replace(model([1.0] * 12), overhead=PassOverhead(0.5, 0.3, 0.2))
    loads = make_loads(costs, 2, None, NO_RULES)
    assert loads.ideal == loads.floor == pytest.approx((12 + 2) / 2)
    found = balance(loads, (0, 1, 0))
    assert loads.of(found).tolist() == pytest.approx([found.counts[0] + found.counts[2] + 2, found.counts[1] + 1])
    assert found.counts[1] in (6, 7)
    assert loads.of(found).max() < loads.of(tidy((0, 4, 9, 12), (0, 1, 0), 2)).max()


def test_a_tight_device_gets_less():
    loads = make_loads(model([1.0] * 9, sizes=[1.0] * 9), 3, [1.0, 1.0, 1 / 9], NO_RULES)
    assert balance(loads, (0, 1, 2)).counts[2] == 1


def test_demands_are_kept():
    rules = CutRules(forbidden=frozenset({4, 5}), forced=frozenset({1}))
    found = balance(make_loads(model([1.0] * 8), 2, None, rules), (0, 1, 0, 1))
    assert rules.allows(found.partition)


def test_fewer_items_than_devices_have_no_layout():
    assert balance(make_loads(model([1.0] * 2), 3, None, NO_RULES), (0, 1, 2)) is None
