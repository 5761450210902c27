"""How a step of this process ends: clipped and stepped at once, or stepped first and validated during the next warm-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum, unique

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zb.execution.executor import Executor
from lightning_zb.execution.loss_scale import LossScale
from lightning_zb.execution.optimistic_step import OptimisticStep
from lightning_zb.execution.optimizer_shards import OptimizerShards
from lightning_zb.execution.rollback import Rollback
from lightning_zb.execution.statistics import DEVICE_COUNTERS, STEP_COUNTERS, Statistics
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.transport import DistributedTransport
from lightning_zb.execution.validation import ValidationChain
from lightning_zb.planning.plan import Plan


@unique
class PostValidation(str, Enum):
    """When an optimizer step that clips by the whole model's norm is taken.

    AUTO starts synchronous and turns optimistic while gradients are not clipped; EXACT is optimistic from the first step,
    with a copy to roll back to; INPLACE undoes a step by inverse arithmetic, which is not bitwise; OFF waits for the norm.
    """

    AUTO = "auto"
    EXACT = "exact"
    INPLACE = "inplace"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class StepRules:
    """How steps are to end.

    Args:
        mode: what the user asked for.
        keeps_gradients: user code reads gradients after clipping, so they must be final and stay.
        error_if_nonfinite: raise on every rank instead of skipping a step whose norm is not finite.
        scaler: the loss scaler of 16-bit training.
    """

    mode: PostValidation
    keeps_gradients: bool = False
    error_if_nonfinite: bool = False
    scaler: torch.amp.GradScaler | None = None


@dataclass(frozen=True, slots=True)
class StepOwner:
    """Implements `lightning_zb.execution.protocols.StepOwner` for a process of the pipeline."""

    optimizer: torch.optim.Optimizer
    buffers: Callable[[], list[Tensor]]
    is_copy: Callable[[nn.Parameter], bool]
    shards: OptimizerShards | None = None

    @property
    def is_shared(self) -> bool:
        """Whether replicas divide the optimizer's state."""
        return self.shards is not None

    def step(self) -> None:
        """Run the optimizer on the gradients that parameters hold now, where state is divided on this replica's share."""
        with nullcontext() if self.shards is None else self.shards.own_gradients(self.optimizer):
            self.optimizer.step()

    def share(self) -> None:
        """Swap what was stepped with the other replicas, where state is divided."""
        if self.shards is not None:
            self.shards.share()


class StepEnding:
    """Ends the training steps of one process.

    Whether AUTO may be optimistic follows from the plan, so it is decided again with each new plan (`replan`): the first
    one holds back with memory, so that it often has nothing to gain, and measured costs may say otherwise.

    Args:
        owner: the optimizer and what a restart restores.
        executors: of this process's devices; with several the whole model is here and nothing is validated.
        rules: how steps are to end.
        plan: makes post-validation worth its copy, or not.
        may_copy: whether AUTO may begin to keep a copy to roll back to.
        past: what this process counted before, with another plan.
    """

    def __init__(
        self,
        owner: StepOwner,
        executors: Sequence[Executor],
        rules: StepRules,
        plan: Plan,
        may_copy: bool = True,
        past: Statistics | None = None,
    ) -> None:
        if owner.is_shared and rules.mode is PostValidation.INPLACE:
            rank_zero_warn(
                "post_validation='inplace' undoes a step from all of its optimizer state, which shard_optimizer=True divides; "
                "steps are undone from copies, as with post_validation='exact'"
            )
            rules = replace(rules, mode=PostValidation.EXACT)
        self.owner = owner
        self._awaits_norm = False
        self._adapts = rules.mode is PostValidation.AUTO and not rules.keeps_gradients
        transport = executors[0].transport
        chain = ValidationChain(transport.channels) if isinstance(transport, DistributedTransport) else None
        switch = _switch(rules, plan, may_copy)
        rollback = Rollback.INPLACE if rules.mode is PostValidation.INPLACE else Rollback.EXACT
        self._step = OptimisticStep(
            owner,
            chain,
            executors[0].statistics,
            rollback if switch.may_be_optimistic else Rollback.EXACT,
            switch,
            error_if_nonfinite=rules.error_if_nonfinite,
            loss_scale=None if rules.scaler is None else LossScale(rules.scaler, owner.optimizer),
            waits_for_norms=rollback is Rollback.INPLACE or not _is_on_cuda(owner.optimizer),
        )
        self._step.past = past or self._step.past
        if chain is not None:
            executors[0].optimistic = self._step

    def keeps_state(self, parameter: nn.Parameter) -> bool:
        """Whether this replica steps the parameter."""
        return self.owner.shards is None or self.owner.shards.is_mine(parameter)

    @property
    def copies(self) -> bool:
        """Whether steps may keep a copy of parameters and optimizer state to roll back to."""
        step = self._step
        return step.chain is not None and step.switch.may_be_optimistic and step.rollback is Rollback.EXACT

    def replan(self, plan: Plan, may_copy: bool) -> None:
        """Decide again which steps are optimistic; called on all processes between the same two steps, nothing pending.

        Args:
            plan: runs from the next step on.
            may_copy: whether steps may begin to keep a copy to roll back to; not where a budget has been filled without.
        """
        gains = _gains(plan) and (may_copy or self.copies)
        if self._adapts and gains != self._step.switch.may_be_optimistic:
            self.statistics.switches += self._step.switch.is_optimistic
            self._step.switch = ModeSwitch.auto() if gains else ModeSwitch.never()

    @property
    def statistics(self) -> Statistics:
        """Where steps are counted."""
        return self._step.statistics

    @property
    def counters(self) -> dict[str, float]:
        """How the steps of the whole pipeline ended, one step late."""
        here = self.statistics.after(self._step.past)
        everywhere = dict(zip(DEVICE_COUNTERS, self._step.counted, strict=True))
        return {name: everywhere.get(name, float(getattr(here, name))) for name in STEP_COUNTERS}

    @property
    def runs_ahead(self) -> bool:
        """Whether devices begin a step without waiting for the others to end the one before."""
        waits = self._awaits_norm or self._step.loss_scale is not None
        return self._step.is_optimistic or not waits

    @property
    def may_run_ahead(self) -> bool:
        """Whether steps of a plan that gains by it would run ahead: they do, or nothing but the plan speaks against it."""
        has_fallen_back = self._step.switch.adapts and self._step.statistics.switches > 0
        return self.runs_ahead or (self._adapts and self._step.chain is not None and not has_fallen_back)

    def clip(self, max_value: float, algorithm: str) -> None:
        """Clip the gradients of the whole model: now, or when their norm is validated.

        Args:
            max_value: largest norm, or largest absolute value of an element.
            algorithm: `norm` or `value`.
        """
        self._awaits_norm = algorithm != "value"
        if algorithm == "value":
            parameters = [p for group in self.owner.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_value_([p for p in parameters if p.grad is not None], max_value)
        else:
            self._step.clip(max_value)

    def finish(self, finishing_order: tuple[int, ...]) -> None:
        """Step; a step whose norm is not finite is skipped on every device, at once or when it is validated.

        Args:
            finishing_order: devices by the time they finish a step.
        """
        self._step.finish(finishing_order)

    @property
    def is_pending(self) -> bool:
        """Whether the last step is still to be validated."""
        return self._step.is_pending

    def flush(self) -> None:
        """Finish a pending step: weights and optimizer state are final afterwards. Not a collective."""
        self._step.flush()

    def close(self) -> None:
        """Finish a pending step and wait until what was sent has arrived."""
        self._step.close()

    def abandon(self) -> None:
        """After an exception leave validated weights, without waiting long for a verdict that may never come."""
        self._step.abandon()


def _gains(plan: Plan) -> bool:
    """Whether devices can run out of step; else an optimistic step gains nothing, and its copy costs memory."""
    return plan.predicted.period < 0.999 * plan.predicted.makespan


def _switch(rules: StepRules, plan: Plan, may_copy: bool) -> ModeSwitch:
    """Which steps are optimistic."""
    if rules.mode is PostValidation.OFF:
        return ModeSwitch.never()
    if rules.keeps_gradients:
        rank_zero_warn(
            "user code reads gradients around the optimizer step, so steps wait for the global norm; "
            "set post_validation='off' to say so yourself"
        )
        return ModeSwitch.never()
    if rules.mode is not PostValidation.AUTO:
        return ModeSwitch.always()
    return ModeSwitch.auto() if _gains(plan) and may_copy else ModeSwitch.never()


def _is_on_cuda(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
