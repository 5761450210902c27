"""Transfers stretched to what whole passes fill."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_zb.planning.costs import ChunkCost, CostModel, LayerCost, Link
from lightning_zb.planning.instance import build_instance, fits_memory, from_schedule, measure
from lightning_zb.planning.placement import wave
from lightning_zb.planning.search import Searcher
from lightning_zb.planning.stretching import stretched_lags


def instance_of(forward, backward, weight, transfer):
    chunk = ChunkCost(forward, backward, weight, 1.0, 0.5)
    layers = (LayerCost("layer", forward, backward, weight, 1.0, 0.5),) * 8
    return build_instance(wave(4, 2), (chunk,) * 8, CostModel(layers, Link(latency=transfer)), 4)


@pytest.mark.parametrize(
    ("times", "f_back", "b_back", "warm_up"),
    [
        ((10.0, 10.0, 7.0, 1.0), 3.0, 3.0, 9.0),  # F and two W, B and two W: 24 for 22; three F
        ((10.0, 10.0, 5.0, 1.0), 4.0, 4.0, 9.0),  # 25 for 22
        ((10.0, 8.0, 11.0, 2.0), 2.0, 2.0, 8.0),  # three B are just 24, two W just 22
        ((10.0, 10.0, 7.0, 0.0), 0.0, 0.0, 0.0),
        ((10.0, 10.0, 0.0, 1.0), 1.0, 1.0, 0.0),  # no W to fill with
        ((1.0, 1.0, 1.0, 1e6), 1e6, 1e6, 1e6),  # nothing fills so long a way
    ],
)
def test_passes_fill_the_way_to_the_device_before(times, f_back, b_back, warm_up):
    instance = instance_of(*times)
    lag, warm_up_lag = stretched_lags(instance)
    transfer = times[3]  # of chunks 0 to 3, one on each device, and back: 4 to 7
    np.testing.assert_allclose(lag[0], [0.0, transfer, transfer, transfer, 0.0, f_back, f_back, f_back])
    np.testing.assert_allclose(lag[1], [b_back, b_back, b_back, 0.0, transfer, transfer, transfer, 0.0])
    np.testing.assert_allclose(warm_up_lag, [0.0] * 5 + [warm_up] * 3)


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
