"""The process groups of one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_zb.planning.placement import Placement

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Channels:
    """Process groups and ranks of one pipeline, seen from one of its devices.

    Args:
        device: this device of the pipeline.
        ranks: the global rank of each device.
        data: for each ordered pair (source, destination) the group its payloads travel in.
        control: layouts; CPU.
        validation: norms and outcomes of optimizer steps; CPU.
        compute_device: where chunks run.
        buffer_device: where data is sent from and received into; the host where gloo serves CUDA devices.
    """

    device: int
    ranks: tuple[int, ...]
    data: dict[tuple[int, int], dist.ProcessGroup]
    control: dist.ProcessGroup
    validation: dist.ProcessGroup
    compute_device: torch.device
    buffer_device: torch.device

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the pipeline in the order of its groups."""
        return tuple(sorted(self.ranks))

    @property
    def position(self) -> int:
        """This process's place in `members`."""
        return self.members.index(self.ranks[self.device])

    def incoming(self, source: int) -> tuple[dist.ProcessGroup, int]:
        """The group and the global rank to receive a device's payloads with."""
        return self.data[source, self.device], self.ranks[source]

    def outgoing(self, destination: int) -> tuple[dist.ProcessGroup, int]:
        """The group and the global rank to send payloads to a device with."""
        return self.data[self.device, destination], self.ranks[destination]


def communicating_pairs(placement: Placement) -> list[tuple[int, int]]:
    """Ordered pairs of devices that hold adjacent chunks, both directions, in a fixed order."""
    adjacent = zip(placement.devices, placement.devices[1:], strict=False)
    return sorted({pair for a, b in adjacent if a != b for pair in ((a, b), (b, a))})


def open_channels(
    placement: Placement,
    pipelines: Sequence[Sequence[int]],
    compute_device: torch.device,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Channels:
    """Create and warm up the groups of this rank's pipeline; every rank of the job calls it with the same pipelines.

    On NCCL each ordered pair gets its own communicator: a communicator is one queue, and with one for all peers
    steps take 1.05 to 1.5 times as long.

    Args:
        placement: chunks to devices; the same for all pipelines.
        pipelines: for each pipeline the global ranks of its devices.
        compute_device: where this rank's chunks run.
        timeout: how long a transfer may take before the peer counts as lost.
    """
    nccl = compute_device.type == "cuda" and "nccl" in dist.get_backend()
    pairs = communicating_pairs(placement)
    mine: Channels | None = None
    for ranks in pipelines:
        everyone = sorted(ranks)
        control, validation = (dist.new_group(everyone, timeout=timeout, backend="gloo") for _ in range(2))
        if nccl:
            data = {(a, b): dist.new_group(sorted({ranks[a], ranks[b]}), timeout=timeout, backend="nccl") for a, b in pairs}
        else:
            shared = dist.new_group(everyone, timeout=timeout, backend="gloo")
            data = dict.fromkeys(pairs, shared)
        if dist.get_rank() in ranks:
            mine = Channels(
                device=list(ranks).index(dist.get_rank()),
                ranks=tuple(ranks),
                data=data,
                control=control,
                validation=validation,
                compute_device=compute_device,
                buffer_device=compute_device if nccl else torch.device("cpu"),
            )
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the pipelines {[list(r) for r in pipelines]}")
    _warm_up(mine)
    return mine


def _warm_up(channels: Channels) -> None:
    """Send one number over every pair, so that no communicator is set up in the first step."""
    works = []
    for source, destination in channels.data:
        number = torch.zeros(1, device=channels.buffer_device)
        if source == channels.device:
            group, rank = channels.outgoing(destination)
            works.append((dist.isend(number, dst=rank, group=group), number))
        elif destination == channels.device:
            group, rank = channels.incoming(source)
            works.append((dist.irecv(number, src=rank, group=group), number))
    for work, _ in works:
        if work is not None:
            work.wait()
