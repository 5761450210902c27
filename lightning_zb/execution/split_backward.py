"""Splits a chunk's backward: B computes input gradients, W the weight gradients that F recorded.

What is deferred: matrix products, convolutions and look-ups with a Parameter or a tensor derived from Parameters only. Norms,
lone biases and elementwise parameters stay in B: under 2 % of the work, and deferring them would stash up to 4.6 times the
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_zb.execution.deferred_ops import Target, WeightWork
from lightning_zb.execution.interception import recording_into


class DeferredWeights:
    """The weight-gradient work that one F recorded, for its W."""

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self._kept: Counter[str] = Counter()
        self._noted: dict[Target, tuple[nn.Parameter, ...]] = {}
        self._work: list[tuple[WeightWork, tuple[int, ...]]] = []
        self._forward_is_over = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record: around F, and again around B, where checkpointed blocks recompute and the work is filled in."""
        with ExitStack() as stack:
            if self._forward_is_over:
                stack.enter_context(self._holding_back())
            stack.enter_context(recording_into(self))
            try:
                yield
            finally:
                self._forward_is_over = True

    def contributions(self) -> dict[nn.Parameter, Tensor]:
        """Run all recorded work of this microbatch and empty the record.

        Returns:
            The gradient of every parameter with recorded work, its uses added in the order in which autograd would add them.

        Raises:
            RuntimeError: a weight or an input was changed in place between B and W.
        """
        sums: dict[Target, Tensor] = {}
        derived_from = self._noted
        work = self._work[::-1]
        self._work, self._noted = [], {}
        while work:
            item, versions = work.pop()
            if versions != _versions(item, derived_from):
                raise RuntimeError(
                    "A weight or an input of shape "
                    f"{tuple(item.held[-1].shape)} was changed in place between B and W; run the optimizer step, and "
                    "whatever else writes to it, after the last W."
                )
            for target, gradient in zip(item.targets, item.compute(), strict=True):
                if target is not None and gradient is not None:
                    sums[target] = _added(sums[target], gradient) if target in sums else gradient
        derived = {target: g for target, g in sums.items() if isinstance(target, GradientEdge)}
        result = {target: g for target, g in sums.items() if not isinstance(target, GradientEdge)}
        if derived:
            for parameter, gradient in _through_derivations(derived, derived_from).items():
                result[parameter] = _added(result[parameter], gradient) if parameter in result else gradient
        return result

    def stash_bytes(self) -> int:
        """Bytes that W holds after B: the storages of output gradients and of inputs, each storage once.

        Inputs are activations that B alone would have freed. Zero before B, when the graph holds the activations.
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for item, _ in self._work for t in item.held}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def kept(self) -> Mapping[str, int]:
        """How often each operator that took a parameter stayed whole in B, by the operator's name."""
        return self._kept

    def defer(self, work: WeightWork) -> None:
        """Keep this work for W; called by the deferred operators' backward.

        Raises:
            RuntimeError: the backward runs within F, or is itself being differentiated.
        """
        if not self._forward_is_over or torch.is_grad_enabled():
            raise RuntimeError(
                "A gradient was taken through a deferred operator inside F or with create_graph=True; "
                "gradients within the training step need a schedule that does not split the backward."
            )
        self._work.append((work, _versions(work, self._noted)))

    def note_deferred(self, target: Target, parameters: tuple[nn.Parameter, ...]) -> None:
        """These parameters have weight work under this target."""
        self._noted[target] = parameters

    def note_kept(self, name: str) -> None:
        """An operator with a parameter stays whole in B."""
        self._kept[name] += 1

    @contextmanager
    def _holding_back(self) -> Iterator[None]:
        """Keep from the parameters what B itself computes for those that also have weight work.

        Their part becomes work for W, so that both parts enter in one call and the parameter's hooks fire once. A parameter
        has a part in B only where the graph holds its AccumulateGrad node, and with it a second reference to the parameter.
        """
        held_back = {id(p): p for parameters in self._noted.values() for p in parameters if _in_a_graph(p)}
        with hooks_silenced(held_back.values()):
            nodes = [get_gradient_edge(p).node for p in held_back.values()]
            handles = [
                node.register_prehook(partial(self._hold_back, p)) for node, p in zip(nodes, held_back.values(), strict=True)
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _hold_back(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> tuple[None]:
        gradient = gradients[0]
        if gradient is not None:
            work = WeightWork((parameter,), lambda: (gradient,), (gradient,))
            self._work.append((work, _versions(work, self._noted)))
        return (None,)


@contextmanager
def hooks_silenced(parameters: Any) -> Iterator[None]:
    """Take the hooks off these parameters while only a part of their gradient is at hand."""
    silenced = []
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                silenced.append((hooks, list(hooks.items())))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, items in silenced:
            hooks.update(items)


def accumulate(contributions: Mapping[nn.Parameter, Tensor]) -> None:
    """Add one microbatch's gradients to the parameters in one engine call, so that hooks fire exactly once.

    Args:
        contributions: parameter -> gradient.
    """
    if contributions:
        torch.autograd.backward(list(contributions), list(contributions.values()))


def _in_a_graph(parameter: nn.Parameter) -> bool:
    return parameter._use_count() > 1  # type: ignore[attr-defined]


def _versions(work: WeightWork, derived_from: Mapping[Target, tuple[nn.Parameter, ...]]) -> tuple[int, ...]:
    weights = (p._version for target in work.targets if target is not None for p in derived_from[target])
    return (*weights, *(tensor._version for tensor in work.held))


def _added(total: Tensor, gradient: Tensor) -> Tensor:
    return gradient + total if total.is_sparse else total + gradient


def _through_derivations(
    derived: dict[GradientEdge, Tensor], derived_from: dict[Target, tuple[nn.Parameter, ...]]
) -> dict[nn.Parameter, Tensor]:
    """Carry the gradients of derived weights through the graph that derived them to its Parameters."""
    parameters = list({id(p): p for edge in derived for p in derived_from[edge]}.values())
    with hooks_silenced(parameters):
        gradients = torch.autograd.grad(list(derived), parameters, list(derived.values()), allow_unused=True)
    return {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
