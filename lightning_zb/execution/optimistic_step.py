"""Optimizer steps taken before the norm of the whole model is known, validated during the next warm-up.

A device steps when the norms known so far neither clip nor overflow, and goes on with the next step's forwards. When the
verdict arrives, either everything stands, or those that stepped roll back, all step (or skip) alike, and the next step
starts again. Weights, optimizer state and losses are those of a synchronous step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from lightning_zb.execution.gradient_norm import NormSlots, clip_gradients, local_norms, total_norm
from lightning_zb.execution.group_values import group_values
from lightning_zb.execution.host_copy import HostCopy, copy_to_host
from lightning_zb.execution.loss_scale import LossScale
from lightning_zb.execution.pending_step import PendingStep
from lightning_zb.execution.protocols import StepOwner
from lightning_zb.execution.rollback import Rollback, UsualNorms, check_invertible, prepare_undo
from lightning_zb.execution.statistics import DEVICE_COUNTERS, Statistics
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.validation import ExpectedVerdict, Outcome, Report, ValidationChain, Verdict, clips, judge


@dataclass(slots=True)
class OptimisticStep:
    """Finishes the optimizer steps of one device.

    Args:
        owner: parameters, optimizer, buffers.
        chain: to the other devices; None where this process holds the whole model.
        statistics: where steps, rollbacks, holds and skips are counted.
        rollback: how a step is undone.
        switch: decides which steps are optimistic; equal on all devices.
        error_if_nonfinite: raise instead of skipping a step whose norm is not finite; a loss scaler's skips never raise.
        loss_scale: of 16-bit training.
        copy: how norms reach the host.
        waits_for_norms: know this device's own norms before stepping, and hold the step where they clip already; else
            step at once and let a thread wait for them, so that the host runs ahead of the device.
    """

    owner: StepOwner
    chain: ValidationChain | None
    statistics: Statistics
    rollback: Rollback = Rollback.EXACT
    switch: ModeSwitch = field(default_factory=ModeSwitch.always)
    error_if_nonfinite: bool = False
    loss_scale: LossScale | None = None
    copy: Callable[[Tensor], HostCopy] = copy_to_host
    waits_for_norms: bool = True
    past: Statistics = field(default_factory=Statistics)
    """What this process counted before, with another plan."""
    counted: tuple[float, ...] = (0.0,) * len(DEVICE_COUNTERS)
    """`DEVICE_COUNTERS` of all devices, as the last verdict told them; one step late."""
    _max_norm: float | None = None
    _verdict: Verdict | None = None
    _pending: PendingStep | None = None
    _restart_due: bool = False
    _share_due: bool = False
    _usual: UsualNorms = field(default_factory=UsualNorms)

    def __post_init__(self) -> None:
        if self.rollback is Rollback.INPLACE:
            check_invertible(self.owner.optimizer)

    # -- the end of a step -----------------------------------------------------------------------------------------

    @property
    def is_optimistic(self) -> bool:
        """Whether the step that ends next is finished before the norm of the whole model is known."""
        return self.chain is not None and self.chain.num_devices > 1 and self.switch.is_optimistic

    def clip(self, max_norm: float) -> None:
        """Clip the whole model's gradients by their norm: now, or once the step is validated.

        Args:
            max_norm: what they are clipped to.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        self._max_norm = max_norm
        if not self.is_optimistic:
            self._verdict = self._judge_together(max_norm)
            if self._verdict.outcome is not Outcome.SKIP:
                clip_gradients(self._gradients().values(), max_norm, self._verdict.total_norm)

    def finish(self, finishing_order: tuple[int, ...]) -> None:
        """Step now, hold the step, or step with everybody; called when all gradients of the step are there.

        An optimistic step takes the gradients off their parameters.

        Args:
            finishing_order: devices by the time they finish a step (`Program.finishing_order`).

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        max_norm, verdict = self._max_norm, self._verdict
        self._max_norm = self._verdict = None
        if max_norm is None:
            if self.loss_scale is None:
                self._step()
                return
            max_norm = math.inf
        if verdict is None and self.is_optimistic:
            assert self.chain is not None
            self._finish_optimistically(self.chain, max_norm, finishing_order)
            return
        verdict = verdict or self._judge_together(max_norm)
        if verdict.outcome is not Outcome.SKIP:
            self._step()

    def _finish_optimistically(self, chain: ValidationChain, max_norm: float, order: tuple[int, ...]) -> None:
        chain.finish()
        parameters = self._parameters()
        report = self._local_report(max_norm)
        place = order.index(chain.device)
        if not self.waits_for_norms:
            verdict = ExpectedVerdict(lambda: self._relay(chain, report(), max_norm, order))
            self._pend(max_norm, verdict, holds=False)
            return
        own = known = report()
        if place > 0:
            known = chain.receive_prefix(order[place - 1], len(parameters)) + own
        total = total_norm(known.slots, parameters)
        if place == len(order) - 1:
            outcome = judge(known, total, max_norm, self.loss_scale is not None)
            chain.send_verdict(order[:-1], outcome)
            self._restart_due = outcome.outcome is not Outcome.KEEP  # the others have begun the next step
            self._note(outcome)
            if outcome.outcome is not Outcome.SKIP:
                clip_gradients(self._gradients().values(), max_norm, outcome.total_norm)
                self._step()
            for parameter in parameters:
                parameter.grad = None
            return
        holds = known.held or known.overflowed or clips(total, max_norm)
        if self.rollback is Rollback.INPLACE:  # which loses moments where gradients dwarf their history
            holds = not self._usual.fit(own.slots.values) or holds
        chain.send_prefix(order[place + 1], replace(known, held=holds))
        self._pend(max_norm, ExpectedVerdict(lambda: chain.receive_verdict(order[-1])), holds)

    def _pend(self, max_norm: float, verdict: ExpectedVerdict, holds: bool) -> None:
        """Step, or hold the step, until the verdict is there."""
        gradients = self._gradients()
        before = group_values(self.owner.optimizer)
        undo, after = None, before
        if holds:
            self.statistics.holds += 1
            self.owner.optimizer._opt_called = True  # type: ignore[attr-defined]  # the learning rate may move on before it
        else:
            undo = prepare_undo(self.rollback, self.owner.optimizer, gradients)
            self._step()
            after = group_values(self.owner.optimizer)
            self.statistics.optimistic_steps += 1
        for parameter in gradients:
            parameter.grad = None
        self._pending = PendingStep(gradients, before, after, undo, max_norm, verdict)

    def _relay(self, chain: ValidationChain, own: Report, max_norm: float, order: tuple[int, ...]) -> Verdict:
        """Pass reports on and wait for the verdict, or reach it; in a thread of its own."""
        parameters = self._parameters()
        place = order.index(chain.device)
        if place > 0:
            own = chain.receive_prefix(order[place - 1], len(parameters)) + own
        if place < len(order) - 1:
            chain.send_prefix(order[place + 1], own)
            return chain.receive_verdict(order[-1])
        verdict = judge(own, total_norm(own.slots, parameters), max_norm, self.loss_scale is not None)
        chain.send_verdict(order[:-1], verdict)
        return verdict

    def _local_report(self, max_norm: float) -> Callable[[], Report]:
        """Start to find out what the others must know of this device's gradients; the call's result waits for it."""
        parameters = self._parameters()
        counters = tuple(float(getattr(self.past, name) + getattr(self.statistics, name)) for name in DEVICE_COUNTERS)
        overflow = None if self.loss_scale is None else self.loss_scale.overflow(self.copy)
        norms = None
        if math.isfinite(max_norm):
            norms = local_norms(parameters, [not self.owner.is_copy(p) for p in parameters], self.copy)

        def get() -> Report:
            slots = NormSlots.empty(len(parameters)) if norms is None else norms.get()
            return Report(slots, overflowed=overflow is not None and bool(overflow.get() > 0), counters=counters)

        return get

    def _judge_together(self, max_norm: float) -> Verdict:
        """The verdict, with everybody waiting for it."""
        report = self._local_report(max_norm)()
        report = report if self.chain is None else self.chain.reduce(report)
        verdict = judge(report, total_norm(report.slots, self._parameters()), max_norm, self.loss_scale is not None)
        self._note(verdict)
        return verdict

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
            Whether the step that has begun since must start again, with `complete` once peers know.

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
        norm = None if verdict.outcome is Outcome.SKIP else verdict.total_norm
        pending.amend(self.owner, norm)
        self._share_due = norm is not None and self.owner.is_shared
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
        """Finish a pending step, so that weights and optimizer state are final.

        Any subset of a pipeline's devices may call it; where the owner shares steps, all replicas of them.
        """
        if self._pending is not None and self.resolve():
            self._restart_due = True
            self.complete()

    def complete(self) -> None:
        """Share what `resolve` stepped again.

        Apart from it, since replicas wait for each other here: a device that waited before it told its pipeline of the
        restart could wait for one whose replica waits for it.
        """
        due, self._share_due = self._share_due, False
        if due:
            self.owner.share()

    def close(self) -> None:
        """Finish a pending step and wait until what this device sent has arrived; before its process ends."""
        self.flush()
        if self.chain is not None:
            self.chain.finish()

    def abandon(self, seconds: float = 2.0) -> None:
        """After an exception leave validated weights: those of the pending step if its verdict comes, else those before it.

        Args:
            seconds: how long to wait for the verdict, which may never come.
        """
        pending = self._pending
        if pending is None:
            return
        stands = False
        if pending.verdict.wait(seconds):
            with suppress(RuntimeError):  # what went wrong first is the error that counts
                stands = not self.owner.is_shared or pending.verdict.get().outcome is Outcome.KEEP
                if stands:
                    self.flush()
        if pending.undo is not None and not stands:  # stepping again takes the other replicas, which may have ended
            pending.amend(self.owner, None)
        self._pending = None

    def _note(self, verdict: Verdict) -> None:
        skips = verdict.outcome is Outcome.SKIP
        self.counted = verdict.counters
        if self.switch.note(restarted=verdict.outcome is not Outcome.KEEP):
            self.statistics.switches += 1
        self.statistics.skips += skips
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=skips)
        elif skips and self.error_if_nonfinite:
            raise RuntimeError(
                f"the gradient norm is {float(verdict.total_norm)}; no device has stepped "
                "(set error_if_nonfinite=False to skip such steps)"
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.owner.step()
        self.owner.share()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.owner.optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad for p in self._parameters() if p.grad is not None}
