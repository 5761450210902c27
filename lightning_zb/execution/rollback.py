"""Undo an optimizer step: from a copy (exact, any optimizer), or by inverse arithmetic (no memory, not bitwise)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Gradients = Mapping[nn.Parameter, Tensor]


@unique
class Rollback(str, Enum):
    """How a step is undone."""

    EXACT = "exact"
    INPLACE = "inplace"


def prepare_undo(rollback: Rollback, optimizer: torch.optim.Optimizer, gradients: Gradients) -> Callable[[], None]:
    """What undoes the step that the optimizer is about to take with these gradients."""
    if rollback is Rollback.INPLACE:
        return Inversion.prepare(optimizer, gradients).restore
    return Snapshot.take(optimizer, gradients).restore


# -- exact ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Parameters and their optimizer state before a step; `restore` brings back every bit.

    Args:
        optimizer: the optimizer.
        parameters: the values of the parameters it is about to change.
        state: their optimizer state; None for a parameter that had none.
    """

    optimizer: torch.optim.Optimizer
    parameters: dict[nn.Parameter, Tensor]
    state: dict[nn.Parameter, dict[str, Any] | None]

    @classmethod
    @torch.no_grad()
    def take(cls, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Snapshot:
        """Copy what a step will change.

        Args:
            optimizer: the optimizer about to step.
            parameters: the parameters with a gradient on this device.
        """
        parameters = list(parameters)
        return cls(
            optimizer,
            {p: p.detach().clone() for p in parameters},
            {p: {k: _copied(v) for k, v in optimizer.state[p].items()} if p in optimizer.state else None for p in parameters},
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Bring parameters and state back."""
        for parameter, value in self.parameters.items():
            parameter.copy_(value)
            before = self.state[parameter]
            if before is None:
                self.optimizer.state.pop(parameter, None)
                continue
            state = self.optimizer.state[parameter]
            for key in set(state) - set(before):
                del state[key]
            for key, old in before.items():
                if isinstance(old, Tensor) and isinstance(state.get(key), Tensor):
                    state[key].copy_(old)
                else:
                    state[key] = old


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


# -- in place ------------------------------------------------------------------------------------------------------

_OUT_OF_PROPORTION = 1e3
"""Adam's second moment is lost from about 1e4 times a gradient's history."""


@dataclass(frozen=True, slots=True)
class Inversion:
    """A step that inverse arithmetic will undo (Appendix C of the first paper).

    Restores 99 % of fp32 parameters bit for bit and the rest to a last bit or so. A second moment is lost where a
    gradient dwarfs its history; the caller holds such a step back instead.

    Args:
        optimizer: SGD, Adam or AdamW.
        gradients: what the step was taken with.
        had_state: the parameters that had optimizer state before it.
    """

    optimizer: torch.optim.Optimizer
    gradients: Gradients
    had_state: frozenset[nn.Parameter]

    @classmethod
    def prepare(cls, optimizer: torch.optim.Optimizer, gradients: Gradients) -> Inversion:
        """Note what inverse arithmetic cannot know afterwards.

        Raises:
            ValueError: the optimizer cannot be inverted.
        """
        check_invertible(optimizer)
        return cls(optimizer, gradients, frozenset(p for p in gradients if _has_history(optimizer.state.get(p, {}))))

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step; group values must be those it was taken with."""
        undo = _INVERSES[type(self.optimizer)]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.gradients:
                    state = self.optimizer.state[parameter]
                    gradient = self.gradients[parameter]
                    undo(parameter, -gradient if group["maximize"] else gradient, state, group)
                    if parameter not in self.had_state:
                        self.optimizer.state.pop(parameter, None)


@dataclass(slots=True)
class UsualNorms:
    """Gradient norms as they usually are; a step that is out of proportion to them should not be taken to be inverted.

    Args:
        norms: running mean of each parameter's norm, 0 where it never had a gradient.
    """

    norms: Tensor | None = None

    def fit(self, norms: Tensor) -> bool:
        """Whether these norms are in proportion; they are remembered where they are finite."""
        usual = norms if self.norms is None else self.norms
        fits = not bool((norms > _OUT_OF_PROPORTION * usual)[usual > 0].any())
        if bool(torch.isfinite(norms).all()):
            self.norms = torch.where(usual > 0, 0.9 * usual + 0.1 * norms, norms)
        return fits


def check_invertible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what inverse arithmetic cannot undo.

    Raises:
        ValueError: which and why.
    """
    if type(optimizer) not in _INVERSES:
        known = ", ".join(sorted(o.__name__ for o in _INVERSES))
        raise ValueError(
            f'{type(optimizer).__name__} cannot be undone in place (only {known} can); use post_validation="exact"'
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError('amsgrad=True cannot be undone in place: a maximum has no inverse; use post_validation="exact"')


def _has_history(state: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Tensor) for v in state.values())


def _undo_sgd(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    if momentum == 0:
        p.add_(gradient, alpha=lr).div_(1 - lr * decay)
        return
    buffer = state["momentum_buffer"]
    if group["nesterov"]:
        p.add_(gradient.add(buffer, alpha=momentum), alpha=lr).div_(1 - lr * decay)
    else:
        p.add_(buffer, alpha=lr)
    buffer.sub_(gradient.add(p, alpha=decay), alpha=1 - group["dampening"]).div_(momentum)


def _undo_adam(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], decoupled: bool = False) -> None:
    lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    first, second, step = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    p.addcdiv_(first, (second.sqrt() / correction2**0.5).add_(eps), value=float(lr) / correction1)
    if decoupled or group.get("decoupled_weight_decay", False):
        p.div_(1 - lr * decay)
    elif decay != 0:
        gradient = gradient.add(p, alpha=decay)
    first.sub_(gradient, alpha=1 - beta1).div_(beta1)
    second.addcmul_(gradient, gradient, value=-(1 - beta2)).clamp_(min=0).div_(beta2)
    state["step"] -= 1


_INVERSES: dict[type, Callable[..., None]] = {
    torch.optim.SGD: _undo_sgd,
    torch.optim.Adam: _undo_adam,
    torch.optim.AdamW: partial(_undo_adam, decoupled=True),
}
