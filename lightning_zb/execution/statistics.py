"""What the executor counts: passes, waits, transfers."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from lightning_zb.planning.schedule import Pass, PassKind

STEP_COUNTERS = ("optimistic_steps", "rollbacks", "holds", "redone_forwards", "skips", "switches")
"""What `Statistics` counts of optimizer steps and their validation."""

DEVICE_COUNTERS = STEP_COUNTERS[:4]
"""Those of them that differ between the devices of a pipeline."""


@dataclass(slots=True)
class Statistics:
    """Running totals of one device.

    Args:
        passes: passes of the schedule executed, by kind; redone forwards are counted apart.
        wait_seconds: host seconds spent waiting for messages.
        messages: messages sent to other devices.
        sent_bytes: their bytes.
        steps: training steps run.
        optimistic_steps: optimizer steps taken before the norm of the whole model was known.
        rollbacks: optimistic steps undone.
        holds: steps held back because the norms known so far already clipped, or could not have been undone.
        redone_forwards: forwards thrown away because a step had to be amended.
        skips: steps nobody took because a gradient was not finite.
        switches: changes between the synchronous and the optimistic step.
    """

    passes: Counter[PassKind] = field(default_factory=Counter)
    wait_seconds: float = 0.0
    messages: int = 0
    sent_bytes: int = 0
    steps: int = 0
    optimistic_steps: int = 0
    rollbacks: int = 0
    holds: int = 0
    redone_forwards: int = 0
    skips: int = 0
    switches: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        """Totals of two devices that one process stands for; they run the same steps."""
        return replace(self.after(other), steps=max(self.steps, other.steps))

    def after(self, past: Statistics) -> Statistics:
        """Totals of one device that was counted twice, one time after the other."""
        return Statistics(**{f.name: getattr(past, f.name) + getattr(self, f.name) for f in fields(self)})

    def as_dict(self) -> dict[str, Any]:
        """The totals under plain names."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**plain, "passes": {kind.value: self.passes[kind] for kind in PassKind if self.passes[kind]}}


class Recorder(Protocol):
    """Takes the times of passes while profiling; the executor calls it in this order for each pass."""

    def wait(self, p: Pass) -> None:
        """The device starts to wait for what the pass needs."""
        ...

    def transfer(self) -> AbstractContextManager[None]:
        """Around the sending of a message, or the posting of a receive."""
        ...

    def start(self, p: Pass) -> None:
        """The pass starts."""
        ...

    def begin_weights(self) -> None:
        """The B of a backward that runs both parts is over, its W begins."""
        ...

    def end(self, p: Pass) -> None:
        """The pass ended; what follows is handing over."""
        ...
