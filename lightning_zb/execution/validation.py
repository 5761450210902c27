"""The validation of an optimizer step along the pipeline: prefix norms one way, the verdict the other way.

Section 4 of the first paper. A device adds its norms to those of the devices that finish before it and passes them on;
the last one knows the norm of the whole model and sends everybody the verdict, which arrives during the next warm-up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zb.execution.channels import Channels
from lightning_zb.execution.gradient_norm import NormSlots
from lightning_zb.execution.transport import TransportError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
            Outcome.SKIP: "the norm is not finite: nobody steps, and the next step starts again",
        }[self]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome and the norm of the whole model's gradients, in the dtype `clip_grad_norm_` would have it."""

    outcome: Outcome
    total_norm: Tensor


def coefficient(total_norm: Tensor, max_norm: float) -> float:
    """What `clip_grad_norm_` multiplies gradients with, before it is limited to 1; NaN where the norm is not finite."""
    return float(max_norm / (total_norm + 1e-6)) if bool(torch.isfinite(total_norm)) else float("nan")


def judge(total_norm: Tensor, max_norm: float, someone_held: bool) -> Verdict:
    """The verdict of the last device in the chain."""
    if not torch.isfinite(total_norm):
        return Verdict(Outcome.SKIP, total_norm)
    clips = coefficient(total_norm, max_norm) < 1
    return Verdict(Outcome.REDO if clips or someone_held else Outcome.KEEP, total_norm)


@dataclass(slots=True)
class ExpectedVerdict:
    """A verdict on its way; a thread waits for it, since gloo cannot be polled.

    Args:
        device: who waits.
        source: who decides.
        work: the posted receive.
        message: its buffer.
    """

    device: int
    source: int
    work: Any
    message: Tensor
    _arrived: threading.Event = field(default_factory=threading.Event)
    _error: RuntimeError | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._wait, daemon=True, name="verdict").start()

    def _wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self._error = error
        self._arrived.set()

    @property
    def has_arrived(self) -> bool:
        """Whether `get` returns at once."""
        return self._arrived.is_set()

    def get(self) -> Verdict:
        """Wait for the verdict.

        Raises:
            TransportError: it never came.
        """
        self._arrived.wait()
        if self._error is not None:
            raise TransportError(
                f"device {self.device} failed waiting for the verdict on its optimizer step: "
                f"device {self.source} has ended or does not answer ({self._error})"
            ) from self._error
        outcome, norm, dtype = self.message.tolist()
        return Verdict(Outcome(int(outcome)), torch.tensor(norm, dtype=torch.float64).to(_DTYPES[int(dtype)]))


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

    def receive_prefix(self, source: int, num_parameters: int) -> tuple[NormSlots, bool]:
        """The norms of all devices that finish before this one, and whether one of them held its step."""
        message = torch.empty(2 * num_parameters + 1, dtype=torch.float64)
        try:
            dist.recv(message, src=self.channels.ranks[source], group=self.channels.validation)
        except RuntimeError as error:
            raise TransportError(
                f"device {self.device} failed waiting for the gradient norms of device {source}, "
                f"which has ended or does not answer ({error})"
            ) from error
        return NormSlots(message[:num_parameters], message[num_parameters:-1]), bool(message[-1])

    def send_prefix(self, destination: int, slots: NormSlots, held: bool) -> None:
        """Pass the norms on."""
        held_flag = torch.tensor([float(held)], dtype=torch.float64)
        self._send(destination, torch.cat([slots.values, slots.filled, held_flag]))

    def expect_verdict(self, source: int) -> ExpectedVerdict:
        """Start waiting for the last device's verdict."""
        message = torch.empty(3, dtype=torch.float64)
        work = dist.irecv(message, src=self.channels.ranks[source], group=self.channels.validation)
        return ExpectedVerdict(self.device, source, work, message)

    def send_verdict(self, destinations: Sequence[int], verdict: Verdict) -> None:
        """Tell everybody."""
        norm = verdict.total_norm
        message = torch.tensor([verdict.outcome.value, float(norm), _DTYPES.index(norm.dtype)], dtype=torch.float64)
        for destination in destinations:
            self._send(destination, message)

    def reduce(self, slots: NormSlots) -> NormSlots:
        """The norms of all devices, at once and with everybody waiting."""
        packed = torch.stack([slots.values, slots.filled])
        dist.all_reduce(packed, group=self.channels.validation)
        return NormSlots(packed[0], packed[1])

    def finish(self) -> None:
        """Free what the step before sent; it has arrived, since its verdict has."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def _send(self, destination: int, message: Tensor) -> None:
        rank = self.channels.ranks[destination]
        self._sending.append((dist.isend(message, dst=rank, group=self.channels.validation), message))
