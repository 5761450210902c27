"""Optimizer steps taken before the norm of the whole model is known, validated during the next warm-up.

A device steps when the norms known so far neither clip nor overflow, and goes on with the next step's forwards. When the
verdict arrives, either everything stands, or those that stepped roll back, all step (or skip) alike, and the next step
starts again. Weights, optimizer state and losses are those of a synchronous step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zb.execution.gradient_norm import NormSlots, local_norms, total_norm
from lightning_zb.execution.protocols import StepOwner
from lightning_zb.execution.rollback import Inversion, Snapshot, check_invertible
from lightning_zb.execution.statistics import Statistics
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.validation import ExpectedVerdict, Outcome, ValidationChain, Verdict, coefficient, judge

_OUT_OF_PROPORTION = 1e3  # in place, Adam's second moment is lost from about 1e4 times a gradient's history


@unique
class Rollback(str, Enum):
    """How a step is undone."""

    EXACT = "exact"
    INPLACE = "inplace"


@dataclass(slots=True)
class _Pending:
    """A step whose verdict is on its way.

    Args:
        gradients: unclipped, taken off the parameters: they outlive the next zero_grad.
        before: group values (learning rate ...) the step belongs to.
        after: group values right after it; what differs later was set for the next step.
        undo: brings parameters and state back; None where the step was held.
        max_norm: what gradients are clipped to.
        verdict: the verdict to come.
    """

    gradients: dict[nn.Parameter, Tensor]
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    undo: Callable[[], None] | None
    max_norm: float
    verdict: ExpectedVerdict


@dataclass(slots=True)
class OptimisticStep:
    """Finishes the optimizer steps of one device.

    Args:
        owner: parameters, optimizer, buffers.
        chain: to the other devices; None where this process holds the whole model.
        statistics: where steps, rollbacks, holds and skips are counted.
        rollback: how a step is undone.
        switch: decides which steps are optimistic; equal on all devices.
        on_host: keep copies for an exact rollback in pinned host memory.
        error_if_nonfinite: raise instead of skipping a step whose norm is not finite.
    """

    owner: StepOwner
    chain: ValidationChain | None
    statistics: Statistics
    rollback: Rollback = Rollback.EXACT
    switch: ModeSwitch = field(default_factory=ModeSwitch.always)
    on_host: bool = False
    error_if_nonfinite: bool = False
    _pending: _Pending | None = None
    _restart_due: bool = False
    _usual_norms: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rollback is Rollback.INPLACE:
            check_invertible(self.owner.optimizer)

    # -- the end of a step -----------------------------------------------------------------------------------------

    def finish(self, max_norm: float, finishing_order: tuple[int, ...]) -> None:
        """Step now, hold the step, or step with everybody; called when all gradients of the step are there.

        Gradients are consumed: `.grad` is None afterwards.

        Args:
            max_norm: clip the norm of the whole model's gradients to it; infinity to only look for non-finite ones.
            finishing_order: devices by the time they finish a step (`Program.finishing_order`).

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        parameters = self._parameters()
        slots = local_norms(parameters, [not self.owner.is_copy(p) for p in parameters])
        if self.chain is not None and self.switch.is_optimistic and len(finishing_order) > 1:
            self._finish_optimistically(self.chain, parameters, slots, max_norm, finishing_order)
        else:
            slots = slots if self.chain is None else self.chain.reduce(slots)
            self._finish_knowing(judge(total_norm(slots, parameters), max_norm, someone_held=False), max_norm)
        for parameter in parameters:
            parameter.grad = None

    def _finish_optimistically(
        self,
        chain: ValidationChain,
        parameters: list[nn.Parameter],
        slots: NormSlots,
        max_norm: float,
        order: tuple[int, ...],
    ) -> None:
        chain.finish()
        own, held = slots, False
        place = order.index(chain.device)
        if place > 0:
            before, held = chain.receive_prefix(order[place - 1], len(parameters))
            slots = before + slots
        total = total_norm(slots, parameters)
        if place == len(order) - 1:
            verdict = judge(total, max_norm, held)
            chain.send_verdict(order[:-1], verdict)
            self._restart_due = verdict.outcome is not Outcome.KEEP  # the others have begun the next step
            self._finish_knowing(verdict, max_norm)
            return
        held = held or not coefficient(total, max_norm) >= 1 or not self._can_be_undone(own)
        chain.send_prefix(order[place + 1], slots, held)
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        before_step = _group_values(self.owner.optimizer)
        pending = _Pending(gradients, before_step, before_step, None, max_norm, chain.expect_verdict(order[-1]))
        if held:
            self.statistics.holds += 1
            self.owner.optimizer._opt_called = True  # type: ignore[attr-defined]  # the learning rate may move on before it
        else:
            pending.undo = self._prepare_undo(gradients)
            self.owner.step()
            pending.after = _group_values(self.owner.optimizer)
            self.statistics.optimistic_steps += 1
        self._pending = pending

    def _finish_knowing(self, verdict: Verdict, max_norm: float) -> None:
        """Step with final gradients, or skip."""
        self._note(verdict)
        if verdict.outcome is not Outcome.SKIP:
            gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
            _clip(gradients, max_norm, verdict.total_norm)
            self.owner.step()

    # -- the verdict -----------------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """Whether the verdict on the last step is still to be looked at."""
        return self._pending is not None

    @property
    def has_verdict(self) -> bool:
        """Whether `resolve` would return at once."""
        return self._pending is not None and self._pending.verdict.has_arrived

    def resolve(self) -> bool:
        """Wait for the verdict on the pending step and carry it out.

        Returns:
            Whether the step that has begun since must start again.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        assert self._pending is not None
        pending, verdict = self._pending, self._pending.verdict.get()
        self._pending = None
        if verdict.outcome is Outcome.KEEP:
            self._note(verdict)
            return False
        if pending.undo is not None:
            self.statistics.rollbacks += 1
        self._redo(pending, None if verdict.outcome is Outcome.SKIP else verdict.total_norm)
        self._note(verdict)
        return True

    def settle(self) -> bool:
        """Before a step: resolve what is known to restart, so that no forward runs in vain.

        Returns:
            Whether the coming step must begin with the exchange that a restart owes to the other devices, because the
            restart became known between steps.
        """
        if self._pending is not None and self._pending.undo is None:
            self.flush()
        due, self._restart_due = self._restart_due, False
        return due

    def flush(self) -> None:
        """Finish a pending step, so that weights and optimizer state are final; any subset of devices may call it."""
        if self._pending is not None and self.resolve():
            self._restart_due = True

    def close(self) -> None:
        """Finish a pending step and wait until what this device sent has arrived; before its process ends."""
        self.flush()
        if self.chain is not None:
            self.chain.finish()

    def abandon(self) -> None:
        """Forget a pending step without waiting: after an exception its verdict may never come."""
        self._pending = None

    @torch.no_grad()
    def _redo(self, pending: _Pending, norm: Tensor | None) -> None:
        """Undo the step if it was taken and, where it has a norm, take it with clipped gradients and its own group values."""
        optimizer = self.owner.optimizer
        now = _group_values(optimizer)
        _set_group_values(optimizer, pending.before)
        if pending.undo is not None:
            pending.undo()
        if norm is not None:
            _clip(pending.gradients, pending.max_norm, norm)
            waiting = {p: p.grad for p in pending.gradients}
            for parameter, gradient in pending.gradients.items():
                parameter.grad = gradient
            with torch.enable_grad():
                self.owner.step()
            for parameter, old in waiting.items():
                parameter.grad = old
        moved = [
            {key: value for key, value in group.items() if not _same(value, after.get(key))}
            for group, after in zip(now, pending.after, strict=True)
        ]
        _set_group_values(optimizer, moved)

    def _note(self, verdict: Verdict) -> None:
        if self.switch.note(restarted=verdict.outcome is not Outcome.KEEP):
            self.statistics.switches += 1
        if verdict.outcome is Outcome.SKIP:
            self.statistics.skips += 1
            if self.error_if_nonfinite:
                raise RuntimeError(
                    f"the gradient norm is {float(verdict.total_norm)}; no device has stepped "
                    "(set error_if_nonfinite=False to skip such steps)"
                )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.owner.optimizer.param_groups for p in group["params"]]

    def _prepare_undo(self, gradients: dict[nn.Parameter, Tensor]) -> Callable[[], None]:
        if self.rollback is Rollback.INPLACE:
            return Inversion.prepare(self.owner.optimizer, gradients).restore
        return Snapshot.take(self.owner.optimizer, gradients, self.on_host).restore

    def _can_be_undone(self, own: NormSlots) -> bool:
        """In place, hold a step whose gradients are out of proportion to what they usually are."""
        if self.rollback is Rollback.EXACT:
            return True
        usual = own.values if self._usual_norms is None else self._usual_norms
        fits = not bool((own.values > _OUT_OF_PROPORTION * usual)[usual > 0].any())
        if bool(torch.isfinite(own.values).all()):
            self._usual_norms = torch.where(usual > 0, 0.9 * usual + 0.1 * own.values, own.values)
        return fits


def _clip(gradients: dict[nn.Parameter, Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place as `clip_grad_norm_` does; it multiplies by 1 where nothing clips."""
    if gradients:
        values = list(gradients.values())
        torch._foreach_mul_(values, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(values[0].device))


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _set_group_values(optimizer: torch.optim.Optimizer, values: list[dict[str, Any]]) -> None:
    for group, new in zip(optimizer.param_groups, values, strict=True):
        for key, value in new.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)  # schedulers hold on to a learning rate that is a tensor
            else:
                group[key] = value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or bool(first == second)
