"""The validation of an optimizer step along the pipeline: prefix norms one way, the verdict the other way.

Section 4 of the first paper. A device adds its norms to those of the devices that finish before it and passes them on;
the last one knows the norm of the whole model and sends everybody the verdict, which arrives during the next warm-up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zb.execution.channels import Channels
from lightning_zb.execution.gradient_norm import NormSlots
from lightning_zb.execution.statistics import DEVICE_COUNTERS
from lightning_zb.execution.transport import TransportError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_COUNTS = (0.0,) * len(DEVICE_COUNTERS)
_NUM_REST = 2 + len(DEVICE_COUNTERS)


@unique
class Outcome(Enum):
    """What becomes of an optimizer step."""

    KEEP = 0
    REDO = 1
    SKIP = 2

    @property
    def message(self) -> str:
        return {
            Outcome.KEEP: "nobody clips: every step that was taken stands",
            Outcome.REDO: "gradients are clipped or a device held its step: all step again, and the next step starts again",
            Outcome.SKIP: "a gradient is not finite: nobody steps, and the next step starts again",
        }[self]


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a step's gradients, of one device or of several.

    Args:
        slots: their norms.
        overflowed: the loss scaler found one that is not finite; always false without a scaler.
        held: a device has held its step.
        counters: `DEVICE_COUNTERS` so far.
    """

    slots: NormSlots
    overflowed: bool = False
    held: bool = False
    counters: tuple[float, ...] = _NO_COUNTS

    def __add__(self, other: Report) -> Report:
        counters = tuple(map(add, self.counters, other.counters))
        return Report(self.slots + other.slots, self.overflowed or other.overflowed, self.held or other.held, counters)

    def to_message(self) -> Tensor:
        """As it travels; adding up the messages of several devices adds up their reports."""
        rest = torch.tensor([float(self.overflowed), float(self.held), *self.counters], dtype=torch.float64)
        return torch.cat([self.slots.values, self.slots.filled, rest])

    @classmethod
    def from_message(cls, message: Tensor) -> Report:
        """Read a report."""
        values, filled = message[:-_NUM_REST].chunk(2)
        overflowed, held, *counters = message[-_NUM_REST:].tolist()
        return cls(NormSlots(values, filled), bool(overflowed), bool(held), tuple(counters))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step, for every device.

    Args:
        outcome: of the step.
        total_norm: of the whole model's gradients, in the dtype `clip_grad_norm_` would have it.
        counters: `DEVICE_COUNTERS` of all devices, from before the step.
    """

    outcome: Outcome
    total_norm: Tensor
    counters: tuple[float, ...] = _NO_COUNTS


def clips(total_norm: Tensor, max_norm: float) -> bool:
    """Whether `clip_grad_norm_` would change gradients of this norm, or make them useless."""
    return not bool(max_norm / (total_norm + 1e-6) >= 1)


def judge(report: Report, total_norm: Tensor, max_norm: float, scales_loss: bool = False) -> Verdict:
    """The verdict on a step, by whoever knows the whole model's gradients.

    Args:
        report: of all devices.
        total_norm: the norm it amounts to.
        max_norm: what gradients are clipped to.
        scales_loss: a loss scaler decides which steps to skip; without one it is the norm.
    """
    skips = report.overflowed if scales_loss else not bool(torch.isfinite(total_norm))
    if skips:
        return Verdict(Outcome.SKIP, total_norm, report.counters)
    redoes = report.held or clips(total_norm, max_norm)
    return Verdict(Outcome.REDO if redoes else Outcome.KEEP, total_norm, report.counters)


class ExpectedVerdict:
    """A verdict on its way; a thread waits for it, since gloo cannot be polled.

    Args:
        wait: returns the verdict.
    """

    def __init__(self, wait: Callable[[], Verdict]) -> None:
        self._arrived = threading.Event()
        self._verdict: Verdict | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(wait,), daemon=True, name="verdict").start()

    def _run(self, wait: Callable[[], Verdict]) -> None:
        try:
            self._verdict = wait()
        except BaseException as error:  # raised where the verdict is asked for
            self._error = error
        self._arrived.set()

    @property
    def has_arrived(self) -> bool:
        """Whether `get` returns at once."""
        return self._arrived.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than this; whether it has arrived."""
        return self._arrived.wait(seconds)

    def get(self) -> Verdict:
        """Wait for the verdict.

        Raises:
            TransportError: it never came.
        """
        self._arrived.wait()
        if self._error is not None:
            raise self._error
        assert self._verdict is not None
        return self._verdict


@dataclass(slots=True)
class ValidationChain:
    """Norms and verdicts between the devices of a pipeline, in a CPU group that no payload uses.

    Args:
        channels: the process groups of the pipeline.
    """

    channels: Channels
    _sending: list[tuple[Any, Tensor]] = field(default_factory=list)

    @property
    def device(self) -> int:
        return self.channels.device

    @property
    def num_devices(self) -> int:
        return len(self.channels.ranks)

    def receive_prefix(self, source: int, num_parameters: int) -> Report:
        """What is known of all devices that finish before this one."""
        message = torch.empty(2 * num_parameters + _NUM_REST, dtype=torch.float64)
        self._receive(message, source, "the gradient norms")
        return Report.from_message(message)

    def send_prefix(self, destination: int, report: Report) -> None:
        """Pass on what is known."""
        self._send(destination, report.to_message())

    def receive_verdict(self, source: int) -> Verdict:
        """Wait for the last device's verdict."""
        message = torch.empty(3 + len(_NO_COUNTS), dtype=torch.float64)
        self._receive(message, source, "the verdict on its optimizer step")
        outcome, norm, dtype, *counters = message.tolist()
        total_norm = torch.tensor(norm, dtype=torch.float64).to(_DTYPES[int(dtype)])
        return Verdict(Outcome(int(outcome)), total_norm, tuple(counters))

    def send_verdict(self, destinations: Sequence[int], verdict: Verdict) -> None:
        """Tell everybody."""
        norm = verdict.total_norm
        head = verdict.outcome.value, float(norm), _DTYPES.index(norm.dtype)
        message = torch.tensor([*head, *verdict.counters], dtype=torch.float64)
        for destination in destinations:
            self._send(destination, message)

    def reduce(self, report: Report) -> Report:
        """What is known of all devices, at once and with everybody waiting."""
        message = report.to_message()
        dist.all_reduce(message, group=self.channels.validation)
        return Report.from_message(message)

    def finish(self) -> None:
        """Free what the step before sent; it has arrived, since its verdict has."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def _receive(self, message: Tensor, source: int, what: str) -> None:
        try:
            dist.recv(message, src=self.channels.ranks[source], group=self.channels.validation)
        except RuntimeError as error:
            raise TransportError(
                f"device {self.device} failed waiting for {what}: device {source} has ended or does not answer ({error})"
            ) from error

    def _send(self, destination: int, message: Tensor) -> None:
        rank = self.channels.ranks[destination]
        self._sending.append((dist.isend(message, dst=rank, group=self.channels.validation), message))
