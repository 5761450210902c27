"""Which process of a pipeline runs which chunks of its plan."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.model.windows import Window, windows
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Assignment:
    """A plan's chunks among the processes of a pipeline, seen from one of them.

    Args:
        placement: chunks to devices.
        windows: for each chunk what it runs of the step.
        ranks: for each device the rank of its process within the pipeline.
        devices: those that this process stands for.
    """

    placement: Placement
    windows: tuple[Window, ...]
    ranks: tuple[int, ...]
    devices: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, num_layers: int, rank: int | None) -> Assignment:
        """Assign the chunks of a plan.

        Args:
            plan: what runs.
            num_layers: layers in the stack.
            rank: of this process within its pipeline; None where it stands for all devices.
        """
        ranks = device_ranks(plan.placement)
        devices = tuple(range(plan.num_devices)) if rank is None else (ranks.index(rank),)
        return cls(plan.placement, windows(plan.partition, num_layers), ranks, devices)

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """For each of `devices` its chunks."""
        return [self.placement.chunks_of(device) for device in self.devices]

    @property
    def own_windows(self) -> list[Window]:
        """What this process runs, device by device."""
        return [self.windows[c] for chunks in self.chunks for c in chunks]

    @property
    def windows_by_rank(self) -> list[list[Window]]:
        """For each process of the pipeline what it runs, where each stands for one device."""
        devices = sorted(range(len(self.ranks)), key=lambda device: self.ranks[device])
        return [[self.windows[c] for c in self.placement.chunks_of(device)] for device in devices]


def device_ranks(placement: Placement) -> tuple[int, ...]:
    """For each device its rank within a pipeline: the last chunk's is 0, where loggers and progress bars live."""
    last = placement.devices[-1]
    return tuple((device - last) % placement.num_devices for device in range(placement.num_devices))
