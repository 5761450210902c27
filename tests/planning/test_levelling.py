"""Levelling: orders stay runnable and within memory, costs are those of an independent simulation, waits become shorter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.annealing import anneal
from lightning_zb.planning.costs import ChunkCost, CostModel, Link
from lightning_zb.planning.instance import (
    build_instance,
    fits_memory,
    from_schedule,
    measure,
    serial_order,
    start_times,
    to_schedule,
)
from lightning_zb.planning.levelling import level
from lightning_zb.planning.placement import wave
from lightning_zb.planning.random_stream import new_stream
from lightning_zb.planning.search import Searcher
from tests.planning.test_reduction import late_reduction
from tests.planning.test_search import problems


def spans_of(instance, order, own_start=1.0):
    start, ends = np.empty(instance.num_passes), np.empty(instance.num_devices)
    assert start_times(instance, order, start, ends)
    return ends - own_start * start[order[instance.offset[:-1]]]


def excess(instance, order, target, own_start=1.0):
    return (np.maximum(0.0, spans_of(instance, order, own_start) - target) ** 2).sum()


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 5), st.sampled_from([0.0, 1.0]))
def test_orders_stay_runnable_and_within_memory(problem, seed, own_start):
    placement, chunks, costs, m, limits = problem
    instance = build_instance(placement, chunks, costs, m, limits)
    order = serial_order(instance)
    target = 0.5 * measure(instance, order, own_start)
    before = excess(instance, order, target, own_start)
    cost = level(instance, order, new_stream(seed), 6000, target, 0.3, 0.01, own_start)
    to_schedule(instance, order).check(placement)
    assert fits_memory(instance, order)
    found = excess(instance, order, target, own_start)
    waited = spans_of(instance, order, own_start).sum() - instance.duration.sum() * m
    assert cost == pytest.approx(found + 0.0015 * instance.duration.mean() * waited, abs=1e-6)  # the guide
    assert found <= before + 0.0015 * instance.duration.mean() * waited + 1e-6


def test_waits_become_shorter_where_the_annealer_is_done():
    """Eight devices where the way back takes 3.2 ms more than whole passes do."""
    chunk = ChunkCost(14.4, 14.4, 9.7, 1.0, 0.43)
    searcher = Searcher(wave(8, 2), (chunk,) * 16, CostModel((), Link(1.6)), 24, (20.0,) * 8)
    searcher.advance(14)
    instance, least = searcher.instance, searcher.bound.seconds
    order, stream = from_schedule(instance, searcher.result().schedule), new_stream(0)
    anneal(instance, order, new_stream(1), 20_000_000, 0.3, 0.03, 0.1, 3.0, 0.6, 1.0)
    first = measure(instance, order)
    for _ in range(4):
        target = least + 0.7 * (measure(instance, order) - least)
        level(instance, order, stream, 10_000_000, target, 0.15, 0.005, 1.0)
    assert measure(instance, order) < least + 0.93 * (first - least)


def test_it_knows_the_reductions():
    instance, order = late_reduction()
    assert measure(instance, order) == 12 + 6
    level(instance, order, new_stream(0), 50_000, 12.0, 0.3, 0.01, 1.0)
    assert measure(instance, order) == 8 + 6  # W1.1 right after B1.1 and W1.0
