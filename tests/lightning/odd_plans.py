"""Plans of shapes that only a co-optimizer makes: uneven cuts, chunks anywhere, an end of the model alone on a device."""

from __future__ import annotations

from pathlib import Path

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link
from lightning_zb.planning.planfile import write_plan
from lightning_zb.planning.planner import make_plan

SHAPES: dict[str, tuple[list[int], list[int]]] = {
    "one chunk beside five": ([1, 2, 2, 2, 2, 1], [0, 0, 1, 0, 0, 0]),
    "five chunks apart beside four": ([1, 1, 1, 2, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0]),
    "five chunks apart beside one, one and two": ([1, 1, 1, 2, 1, 1, 1, 1, 1], [0, 1, 0, 2, 0, 3, 0, 2, 0]),
    "embedding alone on a device, head alone on another": ([1, 3, 2, 3, 1], [1, 0, 2, 0, 3]),
    "ends together on device 2": ([1, 2, 1, 3, 2, 1], [2, 1, 0, 3, 1, 2]),
    "a permutation with uneven chunks": ([2, 1, 1, 2, 1, 2, 1], [2, 0, 3, 1, 0, 2, 0]),
    "head alone beside an early chunk": ([3, 1, 2, 2, 1, 1], [0, 2, 1, 0, 1, 2]),
}
"""Items of each chunk (an embedding, eight layers, a head) and the device of each chunk."""


def num_devices(shape: str) -> int:
    """How many devices a shape has."""
    return max(SHAPES[shape][1]) + 1


def write(shape: str, num_microbatches: int, path: Path) -> Path:
    """Write the plan file of a shape: list-scheduled for layers that differ."""
    counts, devices = SHAPES[shape]
    works = [0.1, *(1.0 + 0.7 * (i % 3) for i in range(8)), 2.5]
    roles = [LayerRole.PROLOGUE, *[LayerRole.LAYER] * 8, LayerRole.EPILOGUE]
    layers = tuple(
        LayerCost(f"item {i}", w, 1.1 * w, 0.8 * w, activation_bytes=w, weight_stash_bytes=0.5 * w, output_bytes=1.0, role=role)
        for i, (w, role) in enumerate(zip(works, roles, strict=True))
    )
    plan = make_plan(
        CostModel(layers, Link(0.1)), num_devices(shape), num_microbatches, "zb", partition=counts, placement=devices
    )
    write_plan(plan, path)
    return path
