"""Megatron-style layouts: read, written, and refused in one sentence."""

from __future__ import annotations

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.planning.layout_string import read_layout, write_layout
from lightning_zb.planning.placement import Partition, cyclic, wave
from lightning_zb.planning.planner import make_plan


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
        ("Et|t|t", "3 stages for 2 devices; write a multiple of 2"),
        ("Et||t|tL", "no items in stage 1"),
        ("Et*3|(t*4", r"has a '\(' without its '\)'; write a group as \(tt\|\)\*2"),
        ("Et|t)L", r"has a '\)' without its '\('"),
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


def test_a_plan_is_made_for_a_layout():
    plan = make_plan(model(6), 2, 4, "zb", partition="Et|t*3|tt|L")
    assert plan.placement == cyclic(2, 2)
    assert [len(chunk) for chunk in plan.partition.chunks] == [2, 3, 2, 1]
    assert write_layout(plan.partition, plan.placement, plan.costs) == "Et|t*3|t*2|L"
    assert make_plan(model(3), 1, 4, "1f1b", partition="Et*3L").partition.num_chunks == 1


def test_a_layout_leaves_no_choice_of_placement():
    with pytest.raises(ValueError, match=r"layout 'Et\*3\|t\*3L' places its chunks itself; drop the placement \[1, 0\]"):
        make_plan(model(6), 2, 4, "zb", partition="Et*3|t*3L", placement=[1, 0])
    with pytest.raises(ValueError, match="partition 'levelled' is unknown"):
        make_plan(model(6), 2, 4, "zb", partition="levelled")
