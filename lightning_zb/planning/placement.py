"""Where layers go: the partition (layers to chunks) and the placement (chunks to devices)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Chunk to device: any map, several chunks to a device, adjacent or not.

    Args:
        devices: the device of each chunk, chunks in model order.
        num_devices: devices of the pipeline; each holds at least one chunk.
    """

    devices: tuple[int, ...]
    num_devices: int

    def __post_init__(self) -> None:
        if set(self.devices) != set(range(self.num_devices)):
            raise ValueError(
                f"placement {list(self.devices)} must use each of the {self.num_devices} devices "
                f"0..{self.num_devices - 1} at least once"
            )

    @property
    def num_chunks(self) -> int:
        return len(self.devices)

    def chunks_of(self, device: int) -> tuple[int, ...]:
        """The chunks of a device, in model order."""
        return tuple(chunk for chunk, owner in enumerate(self.devices) if owner == device)

    def chunks_by_device(self) -> list[list[int]]:
        """`chunks_of` for every device, in one go."""
        chunks: list[list[int]] = [[] for _ in range(self.num_devices)]
        for chunk, owner in enumerate(self.devices):
            chunks[owner].append(chunk)
        return chunks


def cyclic(num_devices: int, chunks_per_device: int = 1) -> Placement:
    """Chunk c on device c mod P; with one chunk per device the plain sequential pipeline."""
    return Placement(tuple(c % num_devices for c in range(num_devices * chunks_per_device)), num_devices)


def wave(num_devices: int, chunks_per_device: int = 2) -> Placement:
    """Down the devices and up again: 0..P-1, P-1..0, ...; with two chunks per device the V of the first paper's section 6."""
    down = list(range(num_devices))
    legs = [down if leg % 2 == 0 else down[::-1] for leg in range(chunks_per_device)]
    return Placement(tuple(device for leg in legs for device in leg), num_devices)


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers to chunks: contiguous runs in model order, none empty.

    Args:
        chunks: for each chunk the indices of its layers.
    """

    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = [layer for chunk in self.chunks for layer in chunk]
        if flat != list(range(len(flat))) or not all(self.chunks):
            raise ValueError(
                f"partition {[list(c) for c in self.chunks]} must be contiguous runs of the layers 0, 1, 2, ... in order, "
                "none empty"
            )

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def num_layers(self) -> int:
        return sum(len(c) for c in self.chunks)

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Partition:
        """Chunks of the given layer counts, in model order."""
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return cls(tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)))
