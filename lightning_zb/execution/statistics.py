"""What the executor counts: passes, waits, transfers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_zb.planning.schedule import Pass, PassKind


@dataclass(slots=True)
class Statistics:
    """Running totals of one device.

    Args:
        passes: passes of the schedule executed, by kind.
        wait_seconds: host seconds spent waiting for messages.
        messages: messages sent to other devices.
        sent_bytes: their bytes.
        steps: training steps run.
    """

    passes: Counter[PassKind] = field(default_factory=Counter)
    wait_seconds: float = 0.0
    messages: int = 0
    sent_bytes: int = 0
    steps: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        """Totals of two devices that one process stands for; they run the same steps."""
        return Statistics(
            passes=self.passes + other.passes,
            wait_seconds=self.wait_seconds + other.wait_seconds,
            messages=self.messages + other.messages,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            steps=max(self.steps, other.steps),
        )

    def as_dict(self) -> dict[str, Any]:
        """The totals under plain names."""
        return {
            "passes": {kind.value: self.passes[kind] for kind in PassKind if self.passes[kind]},
            "wait_seconds": self.wait_seconds,
            "messages": self.messages,
            "sent_bytes": self.sent_bytes,
            "steps": self.steps,
        }


class Recorder(Protocol):
    """Takes the times of passes while profiling; the executor calls it in this order for each pass."""

    def wait(self, p: Pass) -> None:
        """The device starts to wait for what the pass needs."""
        ...

    def start(self, p: Pass) -> None:
        """The pass starts."""
        ...

    def end(self, p: Pass) -> None:
        """The pass ended; what follows is handing over."""
        ...
