"""Which layers a chunk runs: its window on the stack, from a partition of [prologue, layers, epilogue]."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.planning.placement import Partition


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the step that one chunk runs.

    Args:
        start: first layer of the stack that it runs.
        stop: one past its last layer; equal to start for a chunk of the prologue or the epilogue alone.
        is_first: it runs the step's code before the layers for real.
        is_last: it runs on to the end of the step.
    """

    start: int
    stop: int
    is_first: bool
    is_last: bool


def windows(partition: Partition, num_layers: int) -> tuple[Window, ...]:
    """The windows of all chunks, in model order.

    Args:
        partition: of num_layers + 2 items: the prologue, the layers, the epilogue.
        num_layers: layers in the stack.

    Raises:
        ValueError: the partition has another number of items.
    """
    if partition.num_layers != num_layers + 2:
        raise ValueError(
            f"the partition covers {partition.num_layers} items; a stack of {num_layers} layers "
            f"needs {num_layers + 2}, prologue and epilogue included"
        )
    last = partition.num_chunks - 1
    return tuple(
        Window(max(items[0] - 1, 0), min(items[-1], num_layers), chunk == 0, chunk == last)
        for chunk, items in enumerate(partition.chunks)
    )
