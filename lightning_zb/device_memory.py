"""Memory budgets at run time: what a device has left where no budget was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_zb.pipeline import Pipeline
from lightning_zb.planning.budget import MemoryBudget, format_bytes, parse_bytes, workspace_bytes
from lightning_zb.planning.registry import ScheduleSpec, find_schedule
from lightning_zb.profile_window import Profile

RESERVE = 0.1
"""Share of a device's free memory that is left alone: fragments, workspaces, what libraries allocate later."""


def free_bytes(device: torch.device) -> float | None:
    """What a device could still give to activations between two steps; None where there is no limit to speak of (CPU)."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (1 - RESERVE) * (free + unused)


def excesses(budget: MemoryBudget, total_bytes: Sequence[float | None]) -> list[str]:
    """A sentence for each device that allocated more than the size it was given.

    Args:
        budget: as asked for; multiples and None say nothing of the whole device.
        total_bytes: by device all that was allocated at the peak; None where it is not known.
    """
    entries = list(budget) if isinstance(budget, (list, tuple)) else [budget] * len(total_bytes)
    return [
        f"device {device} allocated {format_bytes(total)} in all, more than its memory_budget {entry!r}: "
        "something beside the pipeline allocates there, or workspace has grown since it was measured"
        for device, (entry, total) in enumerate(zip(entries, total_bytes, strict=False))
        if isinstance(entry, str) and total is not None and total > parse_bytes(entry)
    ]


def settled_budget(pipeline: Pipeline, profile: Profile | None) -> MemoryBudget:
    """The budget to plan with: the one asked for, or what the devices have left (a collective).

    Args:
        pipeline: what runs.
        profile: on rank 0 what was measured.
    """
    asked = pipeline.request.memory_budget
    left = free_bytes(pipeline.device)
    if asked is not None or left is None:
        return asked
    everyone: list[Any] = [(pipeline.devices[0], left)]
    if pipeline.channels is not None:
        everyone = [None] * pipeline.plan.num_devices
        dist.all_gather_object(everyone, (pipeline.devices[0], left), group=pipeline.channels.control)
    if profile is None or profile.costs is None or not profile.costs.activation_bytes or _has_own_budget(pipeline):
        return None
    by_device = dict(everyone)
    devices = range(pipeline.plan.num_devices)
    workspace = workspace_bytes(profile.costs, pipeline.plan.partition, pipeline.plan.placement)
    return [max(1.0, by_device.get(d, left) - workspace[d]) / profile.costs.activation_bytes for d in devices]


def _has_own_budget(pipeline: Pipeline) -> bool:
    try:
        spec = find_schedule(pipeline.request.schedule)
    except ValueError:
        return False
    return isinstance(spec, ScheduleSpec) and spec.own_budget is not None
