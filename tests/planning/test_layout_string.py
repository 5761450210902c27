"""Megatron-style layouts: read, written, and refused in one sentence."""

from __future__ import annotations

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.planning.layout_string import read_layout, write_layout
from lightning_zb.planning.placement import Partition, cyclic, wave


def model(num_layers):
    ends = LayerCost("E", 1, 1, 1, role=LayerRole.PROLOGUE), LayerCost("L", 1, 1, 1, role=LayerRole.EPILOGUE)
    return CostModel((ends[0], *(LayerCost("t", 1, 1, 1),) * num_layers, ends[1]))


def test_megatrons_own_example():
    """DeepSeek-V3 on 16 devices with two virtual stages: 61 layers and one of multi-token prediction."""
    partition, placement = read_layout("Et*3|(tt|)*29,m|L", model(62), 16)
    assert placement == cyclic(16, 2)
    assert [len(chunk) for chunk in partition.chunks] == [4, *[2] * 29, 1, 1]


@pytest.mark.parametrize("text", ["Et|t|t|tL", "E|t*4|t*3|L", "Et*2|t|t*2|t*3L"])
def test_what_is_written_reads_the_same(text):
    costs = model(text.count("t") if "*" not in text else {"E|t*4|t*3|L": 7, "Et*2|t|t*2|t*3L": 8}[text])
    partition, placement = read_layout(text, costs, 2)
    assert write_layout(partition, placement, costs) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|t|t", "3 stages, which is no multiple of 2 devices"),
        ("Et||t|tL", "no items in stage 1"),
        ("Ex|tL", "has 'x', which is not one of E, t, m, L"),
        ("Et|tL", r"items E\*1 t\*2 L\*1, but the model has E\*1 t\*3 L\*1"),
        ("tE|ttL", "in this order"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_layout(text, model(3), 2)


def test_a_wave_has_no_layout():
    with pytest.raises(ValueError, match="do not go to the devices 0 to 1 in turn; write a plan file"):
        write_layout(Partition.from_counts([1, 1, 1, 2]), wave(2, 2), model(3))
