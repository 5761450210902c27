"""How fast devices are beside each other, from one piece of work that all of them do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_zb.execution.profiler import Clock

_NUM_RUNS = 20
_NUM_ROUNDS = 4  # other work on a host may slow down all runs of one round
_SIDE = {"cuda": 4096}
_HOST_SIDE = 256
_LEAST_RATIO = 1.2  # a busy machine makes equal devices look this different


def seconds_in_turn(device: torch.device, clock: Clock, group: dist.ProcessGroup) -> float:
    """This process's `reference_seconds`, the least of some rounds (a collective).

    Processes take turns, since those of one host share its cores.

    Args:
        device: runs them.
        clock: of that device.
        group: the processes that compare themselves, on the CPU.
    """
    own = float("inf")
    for turn in range(_NUM_ROUNDS * dist.get_world_size(group)):
        if turn % dist.get_world_size(group) == dist.get_rank(group):
            own = min(own, reference_seconds(device, clock))
        dist.barrier(group)
    return own


def reference_seconds(device: torch.device, clock: Clock) -> float:
    """Seconds of a product and of a pass over memory, as layers have them; the least of several runs.

    Args:
        device: runs them.
        clock: of that device.
    """
    side = _SIDE.get(device.type, _HOST_SIDE)
    matrix = torch.ones(side, side, device=device)
    marks = []
    for _ in range(_NUM_RUNS + 1):  # the first one warms up
        marks.append(clock.mark())
        torch.nn.functional.gelu(matrix @ matrix)
    marks.append(clock.mark())
    seconds = clock.seconds(marks)
    return min(end - start for start, end in pairwise(seconds[1:]))


def relative_speeds(seconds: Sequence[float]) -> tuple[float, ...] | None:
    """Speeds of devices, their mean 1; None where they are about equal.

    Args:
        seconds: what the same work took on each.
    """
    if min(seconds) <= 0 or max(seconds) < _LEAST_RATIO * min(seconds):
        return None
    mean = sum(1 / s for s in seconds) / len(seconds)
    return tuple(1 / (s * mean) for s in seconds)
