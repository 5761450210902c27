"""Memory at run time: what a device has left where no budget was given, and whether it holds more than it may."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.pipeline import Pipeline
from lightning_zb.planning.budget import MemoryBudget, format_bytes, parse_bytes, transient_bytes, workspace_bytes
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.registry import find_schedule
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


def allocated_peak(device: torch.device) -> float | None:
    """The most bytes that this process had allocated on a device; None where it does not tell (CPU)."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def excess(pipeline: Pipeline) -> str | None:
    """A sentence where this process's device has allocated more than the size it was given; None where all is well.

    Args:
        pipeline: what runs; budgets that are multiples say nothing of the whole device, a CPU does not tell what it gave.
    """
    budget, device = pipeline.request.memory_budget, pipeline.devices[0]
    entry = budget[device] if isinstance(budget, (list, tuple)) else budget
    if pipeline.device.type != "cuda" or not isinstance(entry, str):
        return None
    allocated = torch.cuda.max_memory_allocated(pipeline.device)
    if allocated <= parse_bytes(entry):
        return None
    return (
        f"device {device} allocated {format_bytes(allocated)} in all, more than its memory_budget {entry!r}: "
        "something beside the pipeline allocates there, or its layers have not been measured yet"
    )


def held_too_much(plan: Plan, peak_bytes: Sequence[float]) -> Iterator[str]:
    """A sentence for each device whose measured peak of activations is above the limit of the plan that ran."""
    if plan.memory_limit is None:
        return
    transient = transient_bytes(plan.costs, plan.partition, plan.placement)
    for device, (peak, limit, moment) in enumerate(zip(peak_bytes, plan.memory_limit, transient, strict=True)):
        room = limit + moment
        if peak > room:
            size, beside = (f"the {format_bytes(room)}", "") if room > 0 else ("nothing", " beside model states and workspace")
            yield (
                f"device {device} held {format_bytes(peak)} of activations, "
                f"more than {size} that its memory budget leaves{beside}; "
                f"predicted were {format_bytes(plan.predicted.peak_bytes[device])}"
            )


class MemoryWatch:
    """Says at once where devices hold more than they were given."""

    def __init__(self) -> None:
        self.peak_bytes = 0.0
        """Activation bytes that the fullest device held at its peak, as measured last."""
        self._has_exceeded = False

    def compare(self, plan: Plan, peak_bytes: Sequence[float]) -> None:
        """Hold measured peaks against the limits of the plan that ran.

        Args:
            plan: what ran.
            peak_bytes: by device the activation bytes measured at their peak.
        """
        self.peak_bytes = max(peak_bytes)
        for sentence in held_too_much(plan, peak_bytes):
            rank_zero_warn(sentence)

    def look(self, pipeline: Pipeline) -> None:
        """Report once, on the rank it happens, that this process's device has allocated more than the size it was given."""
        sentence = None if self._has_exceeded else excess(pipeline)
        if sentence is not None:
            self._has_exceeded = True
            warnings.warn(sentence, stacklevel=2)


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
    except ValueError:  # a plan file
        return False
    return spec.own_budget is not None
