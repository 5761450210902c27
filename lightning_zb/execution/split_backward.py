"""Splits a chunk's backward: B computes input gradients, W the weight gradients that F recorded.

What is deferred: matrix products, convolutions and look-ups with a Parameter or a tensor derived from Parameters only. Norms,
lone biases and elementwise parameters stay in B: under 2 % of the work, and deferring them would stash up to 4.6 times the
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_zb.execution.deferred_ops import CastParameter, Target, WeightWork
from lightning_zb.execution.entry_points import recording_into
from lightning_zb.execution.weights import Casts, Weight

_Key = TypeVar("_Key")

_CHANGED = (
    "{what} of shape {shape} was changed in place between B and W; "
    "run the optimizer step, and whatever else writes to it, after the last W."
)


class DeferredWeights:
    """The weight-gradient work that one F recorded, for its W."""

    def __init__(self) -> None:
        self.casts = Casts()
        self._kept: Counter[str] = Counter()
        self._parameters: list[nn.Parameter] = []
        self.note_parameter = self._parameters.append
        self._derived: dict[GradientEdge, Weight] = {}
        self._work: list[WeightWork] = []
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._forward_is_over = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record: around F, and again around B, where checkpointed blocks recompute and the work is filled in."""
        with ExitStack() as stack:
            if self._forward_is_over:
                stack.enter_context(self._guarding())
            stack.enter_context(recording_into(self))
            try:
                yield
            finally:
                self._forward_is_over = True

    def contributions(self) -> dict[nn.Parameter, Tensor]:
        """Run all recorded work of this microbatch and empty the record.

        Returns:
            The gradient of every parameter with recorded work, its uses added in the order in which autograd would add them.
            No two of them share memory, nor does anything else.

        Raises:
            RuntimeError: a weight or an input was changed in place between B and W.
        """
        for parameter, version in self._versions:
            if parameter._version != version:
                raise RuntimeError(_CHANGED.format(what="A weight", shape=tuple(parameter.shape)))
        work, self._work = self._work, []
        sums = _run(work)
        result = {target: g for target, g in sums.items() if isinstance(target, nn.Parameter)}
        derived = {target: g for target, g in sums.items() if isinstance(target, GradientEdge)}
        for target, gradient in sums.items():
            if isinstance(target, CastParameter):
                _add(result, target.parameter, gradient.to(target.parameter.dtype))
        del sums
        if derived:
            for parameter, gradient in self._through_derivations(derived).items():
                _add(result, parameter, gradient)
        self._parameters.clear()
        self._derived, self._versions = {}, []
        return result

    def stash_bytes(self) -> int:
        """Bytes that W holds after B: the storages of output gradients and of inputs, each storage once.

        Inputs are activations that B alone would have freed, and weights are not counted. Zero before B, when the graph holds
        the activations.
        """
        weights = {p.untyped_storage().data_ptr() for p in self._deferred_parameters()}
        held = (t for item in self._work for t in item.arguments if isinstance(t, Tensor))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in weights)

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
        self._work.append(work)

    def note_deferred(self, weight: Weight) -> None:
        """This weight has work for W; called as F runs."""
        if isinstance(weight.target, GradientEdge):
            self._derived[weight.target] = weight
        else:
            self.note_parameter(weight.parameters[0])

    def note_kept(self, name: str) -> None:
        """An operator with a parameter stays whole in B; called as F runs."""
        self._kept[name] += 1

    def _deferred_parameters(self) -> list[nn.Parameter]:
        found = {id(p): p for p in self._parameters}
        found |= {id(p): p for weight in self._derived.values() for p in weight.parameters}
        return list(found.values())

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """Watch B for parameters, and derivations of weights, that it uses besides the deferred operators.

        What B computes for a parameter that also has weight work becomes work for W, so that both parts enter in one call and
        the parameter's hooks fire once. A parameter has a part in B only where the graph holds its AccumulateGrad node, and
        with it a second reference to the parameter.
        """
        parameters = self._deferred_parameters()
        in_graph = [p for p in parameters if _is_in_graph(p)]
        handles: list[RemovableHandle] = []
        with _hooks_silenced(in_graph):
            for parameter in in_graph:
                node = get_gradient_edge(parameter).node
                handles.append(node.register_prehook(partial(self._hold_back, parameter)))
            for node in {node for weight in self._derived.values() for node in weight.saving}:
                handles.append(node.register_prehook(partial(self._settle, node)))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self._versions = [(p, p._version) for p in parameters]

    def _hold_back(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> tuple[None]:
        if gradients[0] is not None:
            self._work.append(WeightWork((parameter,), tuple, ((gradients[0].clone(),),)))
        return (None,)

    def _settle(self, node: Node, _gradients: object) -> None:
        """Compute the weights whose derivation B is about to go through itself: it uses the derivation up.

        All their operators are later in the graph, so their work is here already.
        """
        passing: set[Target | None] = {target for target, weight in self._derived.items() if node in weight.saving}
        work, self._work = self._work, []
        sums: dict[GradientEdge, Tensor] = {}
        for item in work:
            if passing.isdisjoint(item.targets):
                self._work.append(item)
                continue
            for target, gradient in _run([item]).items():
                if target in passing and isinstance(target, GradientEdge):
                    _add(sums, target, gradient)
                else:
                    self._work.append(WeightWork((target,), tuple, ((gradient,),)))
        if sums:
            for parameter, gradient in self._through_derivations(sums, retain_graph=True).items():
                self._work.append(WeightWork((parameter,), tuple, ((gradient,),)))

    def _through_derivations(
        self, derived: Mapping[GradientEdge, Tensor], retain_graph: bool = False
    ) -> dict[nn.Parameter, Tensor]:
        """Carry the gradients of derived weights through the graph that derived them to its Parameters."""
        parameters = list({id(p): p for edge in derived for p in self._derived[edge].parameters}.values())
        with _hooks_silenced(parameters):
            gradients = torch.autograd.grad(
                list(derived), parameters, list(derived.values()), retain_graph=retain_graph, allow_unused=True
            )
        result: dict[nn.Parameter, Tensor] = {}
        storages = set()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                storage = gradient.untyped_storage().data_ptr()
                result[parameter] = gradient.clone() if storage in storages else gradient  # a sum gives both terms one tensor
                storages.add(storage)
        return result


def accumulate(contributions: Mapping[nn.Parameter, Tensor]) -> None:
    """Add one microbatch's gradients to the parameters, so that hooks fire exactly once.

    Parameters that anything could watch go through one engine call; for the others the same additions without it.

    Args:
        contributions: parameter -> gradient.
    """
    watched: list[nn.Parameter] = []
    totals, gradients = [], []
    for parameter, gradient in contributions.items():
        total = parameter.grad
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or _is_in_graph(parameter):
            watched.append(parameter)
        elif total is not None and total.dtype is gradient.dtype and _is_dense(total) and _is_dense(gradient):
            totals.append(total)
            gradients.append(gradient)
        elif total is None and gradient.stride() == parameter.stride() and _is_own(gradient):
            parameter.grad = gradient
        else:
            watched.append(parameter)
    if totals:
        torch._foreach_add_(totals, gradients)
    if watched:
        torch.autograd.backward(watched, [contributions[parameter] for parameter in watched])


def _run(work: list[WeightWork]) -> dict[Target, Tensor]:
    """Compute the work in the order in which B recorded it, freeing each item; the gradients' sums by target.

    Raises:
        RuntimeError: an input was changed in place since F.
    """
    sums: dict[Target, Tensor] = {}
    work.reverse()
    while work:
        item = work.pop()
        if item.activation is not None and item.activation._version != item.version:
            raise RuntimeError(_CHANGED.format(what="An input", shape=tuple(item.activation.shape)))
        for target, gradient in zip(item.targets, item.compute(*item.arguments), strict=False):
            if target is not None and gradient is not None:
                _add(sums, target, gradient)
    return sums


def _add(sums: dict[_Key, Tensor], target: _Key, gradient: Tensor) -> None:
    total = sums.setdefault(target, gradient)
    if total is not gradient:
        sums[target] = gradient + total if total.is_sparse else total + gradient


def _is_in_graph(parameter: nn.Parameter) -> bool:
    """Whether some graph, or a data-parallel wrapper, holds the parameter's AccumulateGrad node."""
    return parameter._use_count() > 1  # type: ignore[attr-defined]


def _is_own(gradient: Tensor) -> bool:
    """Whether nothing else refers to this tensor, so that a parameter may take it as its gradient without a copy."""
    return gradient._use_count() == 1 and _is_dense(gradient)  # type: ignore[attr-defined]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


@contextmanager
def _hooks_silenced(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
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
