"""A layout: partition and placement together, as the co-optimizer changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_zb.planning.placement import Partition, Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks in model order.

    Args:
        counts: items of each chunk, none empty.
        devices: device of each chunk; every device has one.
        num_devices: of the pipeline.
    """

    counts: tuple[int, ...]
    devices: tuple[int, ...]
    num_devices: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where chunks begin, and the number of items."""
        return (0, *accumulate(self.counts))

    @property
    def partition(self) -> Partition:
        return Partition.from_counts(self.counts)

    @property
    def placement(self) -> Placement:
        return Placement(self.devices, self.num_devices)


def tidy(cuts: Sequence[int], devices: Sequence[int], num_devices: int) -> Layout | None:
    """The layout of some cuts, without chunks that hold nothing; None where a device is left without any.

    Args:
        cuts: where chunks begin, and the number of items; ascending.
        devices: device of each chunk.
        num_devices: of the pipeline.
    """
    kept = [(int(b) - int(a), int(d)) for a, b, d in zip(cuts[:-1], cuts[1:], devices, strict=True) if b > a]
    if len({d for _, d in kept}) < num_devices:
        return None
    return Layout(tuple(n for n, _ in kept), tuple(d for _, d in kept), num_devices)


def layout_of(partition: Partition, placement: Placement) -> Layout:
    """The layout of a partition and a placement."""
    return Layout(tuple(len(chunk) for chunk in partition.chunks), placement.devices, placement.num_devices)
