"""An optimizer step whose verdict is on its way: taken or held, it can be amended until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zb.execution.gradient_norm import clip_gradients
from lightning_zb.execution.group_values import Values, changed_values, group_values, set_group_values
from lightning_zb.execution.protocols import StepOwner
from lightning_zb.execution.validation import ExpectedVerdict


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that another device may still have reason to clip or skip.

    Args:
        gradients: unclipped, taken off the parameters: they outlive the next zero_grad.
        before: group values (learning rate ...) the step belongs to.
        after: group values right after it; what differs later was set for the next step.
        undo: brings parameters and state back; None where the step was held.
        max_norm: what gradients are clipped to.
        verdict: the verdict to come.
    """

    gradients: dict[nn.Parameter, Tensor]
    before: Values
    after: Values
    undo: Callable[[], None] | None
    max_norm: float
    verdict: ExpectedVerdict

    @torch.no_grad()
    def amend(self, owner: StepOwner, norm: Tensor | None) -> None:
        """Undo the step if it was taken and, where it has a norm, take it with clipped gradients and its own group values.

        Args:
            owner: of the optimizer; sharing what it steps is left to the caller.
            norm: of the whole model's gradients; None to take no step at all.
        """
        now = group_values(owner.optimizer)
        set_group_values(owner.optimizer, self.before)
        if self.undo is not None:
            self.undo()
        if norm is not None:
            clip_gradients(self.gradients.values(), self.max_norm, norm)
            waiting = {p: p.grad for p in self.gradients}
            for parameter, gradient in self.gradients.items():
                parameter.grad = gradient
            with torch.enable_grad():
                owner.step()
            for parameter, old in waiting.items():
                parameter.grad = old
        set_group_values(owner.optimizer, changed_values(now, self.after))
