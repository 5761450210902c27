"""What the profiled steps of a window are for, and the seconds of passes that they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, unique
from itertools import cycle, islice

from lightning_zb.execution.profiler import PassTimes
from lightning_zb.planning.schedule import PassKind

Samples = dict[tuple[int, str], list[float]]
"""Seconds of passes by (chunk, pass kind value)."""


@unique
class StepKind(Enum):
    """How the passes of a profiled step run, and what is noted of them."""

    BYTES = "bytes"  # each backward split; counting bytes slows it down
    LAYERS = "layers"  # each backward split; timing layers slows it down
    WHOLE = "whole"  # each backward whole, at full speed, whatever the plan says
    SPLIT = "split"  # each backward split, at full speed
    RUNNING = "running"  # as the plan says, at full speed

    @property
    def runs_whole(self) -> bool | None:
        """Whether backwards run whole; None: as the plan says.

        All of a step do or none: a whole backward adds its gradients at B, and they are added in the order of microbatches.
        """
        return None if self is StepKind.RUNNING else self is StepKind.WHOLE


def profiling_steps(num_steps: int) -> list[StepKind]:
    """The steps that measure layers, in turn.

    Args:
        num_steps: how many, 2 at least.
    """
    in_turn = cycle([StepKind.LAYERS, StepKind.WHOLE, StepKind.RUNNING, StepKind.SPLIT])
    return [StepKind.BYTES, *islice(in_turn, num_steps - 1)]


def running_steps(num_steps: int, counts_bytes: bool = False) -> list[StepKind]:
    """The steps that see how a plan does.

    Args:
        num_steps: how many at full speed.
        counts_bytes: whether one before them counts bytes.
    """
    return [StepKind.BYTES] * counts_bytes + [StepKind.RUNNING] * num_steps


def usual(values: Sequence[float]) -> float:
    """The mean without the largest tenth: what a pass adds to a step, hiccups left out."""
    kept = sorted(values)[: len(values) - len(values) // 10]
    return sum(kept) / len(kept)


def pass_samples(steps: Iterable[tuple[StepKind, Sequence[PassTimes]]]) -> Samples:
    """The seconds of F, B, W and BW by chunk, from steps at full speed; from steps that time layers where there is no other.

    Args:
        steps: the passes of each step.
    """
    quick: Samples = {}
    slow: Samples = {}
    for kind, passes in steps:
        target = slow if kind is StepKind.LAYERS else quick
        whole: dict[tuple[int, int], float] = {}
        for t in passes:
            chunk, microbatch = t.run.chunk, t.run.microbatch
            # also where a shared parameter keeps both parts from running as one
            is_whole = kind is StepKind.WHOLE or (kind is StepKind.RUNNING and t.run.kind is PassKind.BACKWARD)
            if t.run.kind is not PassKind.FORWARD and is_whole:
                whole[chunk, microbatch] = whole.get((chunk, microbatch), 0.0) + sum(t.parts.values())
                continue
            for part, seconds in t.parts.items():
                target.setdefault((chunk, part), []).append(seconds)
        for (chunk, _), seconds in whole.items():
            target.setdefault((chunk, PassKind.BACKWARD.value), []).append(seconds)
    return {**slow, **quick}
