"""What chunks of layers cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zb.planning.costs import CostModel, LayerCost, PassOverhead
from lightning_zb.planning.planner import make_plan

LAYERS = tuple(LayerCost(f"layer{i}", 1.0, 2.0, 1.5, activation_bytes=1.0) for i in range(8))
OVERHEAD = PassOverhead(0.5, 0.25, 0.125)


def test_one_chunk_more_costs_the_overhead_of_its_passes_once_more():
    costs = CostModel(LAYERS, overhead=OVERHEAD)
    whole, left, right = costs.chunk(range(8)), costs.chunk(range(3)), costs.chunk(range(3, 8))
    assert left.forward + right.forward == whole.forward + OVERHEAD.forward
    assert left.backward_input + right.backward_input == whole.backward_input + OVERHEAD.backward_input
    assert left.backward_weight + right.backward_weight == whole.backward_weight + OVERHEAD.backward_weight
    assert left.work + right.work == pytest.approx(whole.work + OVERHEAD.work)


@pytest.mark.parametrize("backward", [None, 3.0])
def test_a_whole_backward_is_one_pass(backward: float | None):
    costs = CostModel(tuple(replace(layer, backward=backward) for layer in LAYERS), overhead=OVERHEAD)
    assert costs.chunk(range(8)).whole_backward == 8 * (backward or 3.5) + OVERHEAD.backward_input


def test_a_plan_has_fewer_chunks_where_each_costs_more():
    cheap, dear = (
        make_plan(CostModel(LAYERS, overhead=PassOverhead(each, each)), 2, 4, "auto", effort=2) for each in (0.0, 3.0)
    )
    assert dear.partition.num_chunks < cheap.partition.num_chunks
    assert dear.predicted.step_time > cheap.predicted.step_time
