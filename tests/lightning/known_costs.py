"""Layers of known times, to plan with."""

from __future__ import annotations

from lightning_zb.planning.costs import CostModel, LayerCost


def costs(*seconds: float) -> CostModel:
    return CostModel(tuple(LayerCost(f"layers.{i}", s, s, s, 1.0, 0.5) for i, s in enumerate(seconds)))


EQUAL = costs(*[1.0] * 8)
UNEQUAL = costs(1, 1, 1, 1, 4, 4, 4, 4)
