"""The gradients that a schedule computes, kept apart from those that Lightning zeroes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class StepGradients:
    """Gradients between the schedule, which runs in `training_step`, and `backward`.

    Lightning zeroes gradients between the two calls: what was there before waits for that outside the schedule, what
    the schedule computes is hidden from it.
    """

    def __init__(self) -> None:
        self._computed: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def computing(self, module: nn.Module) -> Iterator[None]:
        """Around the schedule: within it the module's parameters have no gradients but those it computes."""
        before = _taken_off(module)
        yield
        self._computed = _taken_off(module)
        for p, gradient in before:
            p.grad = gradient

    def enter(self) -> None:
        """Add what the schedule computed to what parameters hold now."""
        for p, gradient in self._computed:
            p.grad = gradient if p.grad is None else p.grad + gradient
        self._computed = []


def _taken_off(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The gradients of a module's parameters, which lose them."""
    taken = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    for p, _ in taken:
        p.grad = None
    return taken
