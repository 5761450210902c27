"""Defers the weight gradients of any operator, through a small graph of its own; slower than deferred_ops, and general."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_unflatten

from lightning_zb.execution.deferred_ops import Recorder, Target, WeightWork


class Call(NamedTuple):
    """A call with its arguments flattened.

    Attributes:
        function: what is called; it returns one tensor.
        structure: of its arguments and keywords.
        leaves: the flattened arguments.
        activations: positions of the leaves that need a gradient in B.
        weights: positions of the leaves that need one in W.
        autocast: device type, whether it is on, and its dtype.
    """

    function: Callable[..., Tensor]
    structure: TreeSpec
    leaves: list[Any]
    activations: tuple[int, ...]
    weights: tuple[int, ...]
    autocast: tuple[str, bool, torch.dtype]

    def run(self, leaves: list[Any]) -> Tensor:
        """Call with these leaves, under the autocast of F."""
        device, enabled, dtype = self.autocast
        arguments, keywords = tree_unflatten(leaves, self.structure)
        if torch.is_autocast_enabled(device) == enabled and torch.get_autocast_dtype(device) is dtype:
            return self.function(*arguments, **keywords)
        with torch.autocast(device, dtype, enabled=enabled):
            return self.function(*arguments, **keywords)

    def run_apart(self, leaves: list[Any]) -> tuple[GradientEdge, list[Tensor], list[Tensor], Tensor]:
        """Call on detached operands, with a graph.

        Returns:
            The graph's end, the activations and weights that it starts from, and the output.
        """
        own = list(leaves)
        for position in (*self.activations, *self.weights):
            own[position] = own[position].detach().requires_grad_()
        with torch.enable_grad():
            output = self.run(own)
        return get_gradient_edge(output), [own[i] for i in self.activations], [own[i] for i in self.weights], output


def _weights_of(edge: GradientEdge, weights: list[Tensor], g: Tensor) -> Sequence[Tensor | None]:
    gradients = torch.autograd.grad([edge], weights, [g], allow_unused=True)
    storage = g.untyped_storage().data_ptr()
    return [w.clone() if w is not None and w.untyped_storage().data_ptr() == storage else w for w in gradients]


class DeferredCall(torch.autograd.Function):
    """A call; arguments: anchor, recorder, targets, call, whether hooks take saved tensors away, then the activations.

    Under saved-tensor hooks (checkpointing) a graph built in F would ask for a recomputation of its own in B and again in W, so
    there the operator runs again in B on the recomputed operands.
    """

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor | None,
        recorder: Recorder,
        targets: tuple[Target, ...],
        call: Call,
        saved_by_hooks: bool,
        *_activations: Tensor,
    ) -> Tensor:
        ctx.deferred = recorder, targets
        ctx.graph = None
        if not saved_by_hooks:
            *ctx.graph, output = call.run_apart(call.leaves)
            return output.detach()
        ctx.positions = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        ctx.save_for_backward(*(call.leaves[i].detach() for i in ctx.positions))
        ctx.call = call._replace(leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves])
        return call.run(call.leaves).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        recorder, targets = ctx.deferred
        if ctx.graph is None:
            leaves = list(ctx.call.leaves)
            for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
                leaves[position] = tensor
            edge, activations, weights, _ = ctx.call.run_apart(leaves)
        else:
            (edge, activations, weights), ctx.graph = ctx.graph, None
        gx = torch.autograd.grad([edge], activations, [g], retain_graph=True, allow_unused=True) if activations else ()
        recorder.defer(WeightWork(targets, _weights_of, (edge, weights, g)))
        return None, None, None, None, None, *gx
