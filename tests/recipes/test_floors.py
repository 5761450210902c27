"""Floors under all plans: by brute force, by hand, and against what planners find."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planner import make_plan
from recipes.benchmarks.floors import floor, least_largest_share, way_and_back

_SECONDS = st.sampled_from([0.5, 1.0, 1.5, 4.0])


@settings(deadline=None, max_examples=25)
@given(st.lists(_SECONDS, min_size=2, max_size=6), st.integers(1, 3))
def test_the_share_is_the_least_of_all_assignments(work, num_devices):
    loads = ([sum(w for w, d in zip(work, on, strict=True) if d == e) for e in range(num_devices)]
             for on in product(range(num_devices), repeat=len(work)))  # fmt: skip
    assert least_largest_share(tuple(work), num_devices) == pytest.approx(min(map(max, loads)), rel=1e-5)


def test_the_way_leads_over_every_device():
    """Two layers and a head on three devices: all F, F and B of the head three times more, all B, two transfers each way."""
    layers = (LayerCost("a", 1.0, 2.0, 0.5, output_bytes=1.0), LayerCost("b", 1.0, 2.0, 0.5, output_bytes=1.0))
    costs = CostModel((*layers, LayerCost("head", 5.0, 6.0, 4.0)), Link(0.25))
    assert way_and_back(costs, 3, 4) == 1 + 1 + 4 * (5 + 6) + 2 + 2 + 4 * 0.25 + 0.5


def test_weights_that_memory_cannot_put_off_are_on_the_way():
    """Of four W of the head its device holds what one needs beside the states: three run before its last B has ended."""
    head = LayerCost("head", 5.0, 6.0, 4.0, activation_bytes=3.0, weight_stash_bytes=3.0, parameter_bytes=2.0)
    costs = CostModel((LayerCost("a", 1.0, 2.0, 0.5), head))
    without = 1 + 4 * (5 + 6) + 2 + 0.5
    assert [way_and_back(costs, 2, 4, capacity) for capacity in (5.0, 7.9, 8.0, 14.0)] == [
        without + 3 * 4, without + 3 * 4, without + 2 * 4, without
    ]  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_no_plan_comes_below(data):
    layers = tuple(
        LayerCost(str(i), *(data.draw(_SECONDS) for _ in range(3)), 1.0, data.draw(st.sampled_from([0.0, 0.5, 1.0])), 2.0, 1.0)
        for i in range(data.draw(st.integers(4, 7)))
    )
    costs = CostModel(layers, data.draw(st.sampled_from([Link(), Link(0.5)])))
    num_devices, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    capacity = data.draw(st.sampled_from([24, 30, 48]))
    for name in ("1f1b", "zb", "auto"):
        with suppress(InfeasibleBudget):
            plan = make_plan(costs, num_devices, m, name, f"{capacity}B", partition=None if name == "auto" else "balanced")
            assert plan.predicted.step_time >= floor(costs, num_devices, m, capacity) * (1 - 1e-9)
