from __future__ import annotations

import pytest

from lightning_zb.planning.placement import Partition, Placement, cyclic, wave


def test_shapes():
    assert cyclic(3).devices == (0, 1, 2)
    assert cyclic(2, 2).devices == (0, 1, 0, 1)
    assert wave(3).devices == (0, 1, 2, 2, 1, 0)
    assert wave(2, 3).devices == (0, 1, 1, 0, 0, 1)
    assert wave(3).chunks_of(1) == (1, 4)


def test_every_device_has_a_chunk():
    with pytest.raises(ValueError, match="must use each of the 3 devices"):
        Placement((0, 1), 3)


def test_partitions_are_contiguous():
    assert Partition.from_counts([1, 2]).chunks == ((0,), (1, 2))
    for chunks in (((0,), ()), ((1,), (0,)), ((0,), (2,))):
        with pytest.raises(ValueError, match="contiguous"):
            Partition(chunks)
