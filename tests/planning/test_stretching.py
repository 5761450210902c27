"""Transfers stretched to what whole passes fill."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_zb.planning.costs import ChunkCost, CostModel, LayerCost, Link
from lightning_zb.planning.instance import build_instance, fits_memory, from_schedule
from lightning_zb.planning.placement import wave
from lightning_zb.planning.search import Searcher, measure
from lightning_zb.planning.stretching import stretched_lags


def instance_of(forward, backward, weight, transfer):
    chunk = ChunkCost(forward, backward, weight, 1.0, 0.5)
    layers = (LayerCost("layer", forward, backward, weight, 1.0, 0.5),) * 8
    return build_instance(wave(4, 2), (chunk,) * 8, CostModel(layers, Link(latency=transfer)), 4)


@pytest.mark.parametrize(
    ("times", "up", "down"),
    [
        ((10.0, 10.0, 7.0, 1.0), 2.0, 2.0),  # F and two W, B and two W: 24 for 22
        ((10.0, 10.0, 5.0, 1.0), 2.5, 2.5),  # 25 for 22
        ((10.0, 8.0, 11.0, 2.0), 2.0, 3.0),  # three B are just 24; B and W are 19 for 20, two W 22
        ((10.0, 10.0, 7.0, 0.0), 0.0, 0.0),
        ((10.0, 10.0, 0.0, 1.0), 1.0, 1.0),  # no W to fill with
        ((1.0, 1.0, 1.0, 1e6), 1e6, 1e6),  # nothing fills so long a way
    ],
)
def test_passes_fill_the_way_to_the_next_device_and_back(times, up, down):
    instance = instance_of(*times)
    stretched = stretched_lags(instance)
    linked = instance.lag > 0.0
    assert (stretched[~linked] == 0.0).all()
    np.testing.assert_allclose(stretched[0][linked[0]], up)
    np.testing.assert_allclose(stretched[1][linked[1]], down)


def test_the_search_stretches_where_memory_is_plenty():
    layers = (LayerCost("layer", 10.0, 10.0, 7.0, 1.0, 0.5, output_bytes=1.0),) * 8
    chunk = ChunkCost(10.0, 10.0, 7.0, 1.0, 0.5)
    costs = CostModel(layers, Link(latency=1.6))
    values = []
    for effort in (14, 30, 62):
        searcher = Searcher(wave(4, 2), (chunk,) * 8, costs, 12, (12.0,) * 4)
        searcher.advance(effort)
        order = from_schedule(searcher.instance, searcher.result().schedule)
        assert fits_memory(searcher.instance, order)
        assert measure(searcher.instance, order) == searcher.value
        values.append(searcher.value)
        assert searcher.optimal or (searcher._stretched is not None) == (effort > 14)
        assert effort > 14 or not searcher.optimal
    assert values == sorted(values, reverse=True)
