"""How a step of this process ends: clipped and stepped at once, or stepped first and validated during the next warm-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zb.execution import gradient_norm
from lightning_zb.execution.executor import Executor
from lightning_zb.execution.optimistic_step import OptimisticStep, Rollback
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

    @classmethod
    def parse(cls, value: str) -> PostValidation:
        """Read what the user wrote.

        Raises:
            ValueError: it is none of the four.
        """
        if value not in {mode.value for mode in cls}:
            raise ValueError(f"post_validation={value!r} is unknown; write one of {', '.join(mode.value for mode in cls)}")
        return cls(value)


@dataclass(frozen=True, slots=True)
class StepOwner:
    """Implements `lightning_zb.execution.protocols.StepOwner` for a process of the pipeline."""

    optimizer: torch.optim.Optimizer
    buffers: Callable[[], list[Tensor]]
    is_copy: Callable[[nn.Parameter], bool]

    def step(self) -> None:
        """Run the optimizer on the gradients that parameters hold now."""
        self.optimizer.step()


class StepEnding:
    """Ends the training steps of one process.

    Args:
        owner: the optimizer and what a restart restores.
        executors: of this process's devices; with several the whole model is here and nothing is validated.
        mode: what the user asked for.
        plan: makes post-validation worth its copy, or not.
        keeps_gradients: user code reads gradients after clipping, so they must be final and stay.
        error_if_nonfinite: raise on every rank instead of skipping a step whose norm is not finite.
    """

    def __init__(
        self,
        owner: StepOwner,
        executors: Sequence[Executor],
        mode: PostValidation,
        plan: Plan,
        keeps_gradients: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        self.owner = owner
        self._max_norm: float | None = None
        self._skips = self._awaits_norm = False
        self._statistics = executors[0].statistics
        self._optimistic: OptimisticStep | None = None
        self._error_if_nonfinite = error_if_nonfinite
        transport = executors[0].transport
        self._chain = ValidationChain(transport.channels) if isinstance(transport, DistributedTransport) else None
        if mode is not PostValidation.OFF and keeps_gradients:
            rank_zero_warn(
                "user code reads gradients around the optimizer step, so steps wait for the global norm; "
                "set post_validation='off' to say so yourself"
            )
        elif mode is PostValidation.AUTO and plan.predicted.step_time >= 0.999 * plan.predicted.makespan:
            pass  # devices cannot run out of step under this plan: nothing to gain, and the copy costs memory
        elif mode is not PostValidation.OFF and self._chain is not None:
            switch = ModeSwitch.auto() if mode is PostValidation.AUTO else ModeSwitch.always()
            rollback = Rollback.INPLACE if mode is PostValidation.INPLACE else Rollback.EXACT
            self._optimistic = OptimisticStep(
                owner, self._chain, executors[0].statistics, rollback, switch, error_if_nonfinite=error_if_nonfinite
            )
            executors[0].optimistic = self._optimistic

    @property
    def copies(self) -> bool:
        """Whether steps may keep a copy of parameters and optimizer state to roll back to."""
        return self._optimistic is not None and self._optimistic.rollback is Rollback.EXACT

    @property
    def runs_ahead(self) -> bool:
        """Whether devices begin a step without waiting for the others to end the one before."""
        return not self._awaits_norm or (self._optimistic is not None and self._optimistic.switch.is_optimistic)

    def clip(self, max_value: float, algorithm: str) -> None:
        """Clip the gradients of the whole model: now, or when their norm is validated.

        Args:
            max_value: largest norm, or largest absolute value of an element.
            algorithm: `norm` or `value`.
        """
        self._awaits_norm = algorithm != "value"
        parameters = [p for group in self.owner.optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_([p for p in parameters if p.grad is not None], max_value)
        elif self._optimistic is not None:
            self._max_norm = max_value
        else:
            slots = gradient_norm.local_norms(parameters, [not self.owner.is_copy(p) for p in parameters])
            total = gradient_norm.total_norm(slots if self._chain is None else self._chain.reduce(slots), parameters)
            self._skips = not bool(torch.isfinite(total))
            if self._skips and self._error_if_nonfinite:
                raise RuntimeError(
                    f"the gradient norm is {float(total)}; no device has stepped "
                    "(set error_if_nonfinite=False to skip such steps)"
                )
            gradient_norm.clip_gradients(parameters, max_value, total)

    def finish(self, finishing_order: tuple[int, ...]) -> None:
        """Step; a step whose norm is not finite is skipped on every device, at once or when it is validated.

        Args:
            finishing_order: devices by the time they finish a step.
        """
        if self._skips:
            self._skips = False
            self._statistics.skips += 1
            return
        if self._optimistic is None or self._max_norm is None:
            self.owner.step()
            return
        max_norm, self._max_norm = self._max_norm, None
        self._optimistic.finish(max_norm, finishing_order)

    def flush(self) -> None:
        """Finish a pending step: weights and optimizer state are final afterwards. Not a collective."""
        if self._optimistic is not None:
            self._optimistic.flush()

    def close(self) -> None:
        """Finish a pending step and wait until what was sent has arrived."""
        if self._optimistic is not None:
            self._optimistic.close()

    def abandon(self) -> None:
        """Forget a pending step: after an exception its verdict may never come."""
        if self._optimistic is not None:
            self._optimistic.abandon()
