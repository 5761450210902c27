"""Operators whose backward computes the input gradient at once and leaves the weight gradient as work for W.

Every operator runs the kernels, operand order and layouts of autograd's own formulas (FunctionsManual.cpp), so that gradients
keep their bits. Weights travel in a tuple: a bare tensor argument would become an edge to the Parameter, whose hooks would then
fire in B with no gradient. Inputs go through `save_for_backward`, so activation checkpointing recomputes them, once, in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Target: TypeAlias = "nn.Parameter | GradientEdge"
"""Where a weight gradient goes: to a Parameter, or into the graph that derives the weight from Parameters."""


class WeightWork(NamedTuple):
    """One operator's weight gradients, to be computed in W.

    Attributes:
        targets: where the gradients go; None where the operand wants none.
        compute: returns one gradient for each target.
        held: the tensors that stay alive for this work.
    """

    targets: tuple[Target | None, ...]
    compute: Callable[[], Sequence[Tensor | None]]
    held: tuple[Tensor, ...]


class Recorder(Protocol):
    """Takes the weight work of operators as their backward runs."""

    def defer(self, work: WeightWork) -> None:
        """Keep this work for W."""


def column_major(matrix: Tensor) -> bool:
    """Whether autograd's formulas take the two last dimensions of a tensor as a transposed matrix."""
    stride = matrix.stride()
    return stride[-2] == 1 and stride[-1] == matrix.shape[-2]


def mm_left_gradient(g: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Gradient of `left @ right` for left (autograd's mm_mat1_backward)."""
    return right.mm(g.t()).t() if column_major(left) else g.mm(right.t())


def mm_right_gradient(g: Tensor, left: Tensor, right_is_column_major: bool) -> Tensor:
    """Gradient of `left @ right` for right (autograd's mm_mat2_backward), which needs only the layout of right."""
    return g.t().mm(left).t() if right_is_column_major else left.t().mm(g)


def not_a_view(output: Tensor) -> Tensor:
    """The same tensor without its view relation, which would forbid in-place operators on a Function's output."""
    return output.detach() if output._is_view() else output


def _linear_work(
    g: Tensor, g2: Tensor, x2: Tensor, weight_is_contiguous: bool, bias_dims: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    weight_gradient = g2.t().mm(x2) if weight_is_contiguous else x2.t().mm(g2).t()
    return weight_gradient, g.sum(bias_dims) if bias_dims else None


class Linear(torch.autograd.Function):
    """`F.linear`; arguments: input, anchor, recorder, (weight, bias), targets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, recorder: Recorder, operands: Any, targets: Any) -> Tensor:
        weight, bias = operands
        # The weight still requires a gradient here: torch folds a strided input into one product only then.
        output = torch._C._nn.linear(x, weight, bias)
        ctx.save_for_backward(x, weight.detach())
        ctx.recorder, ctx.targets = recorder, targets
        return not_a_view(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = x.dim() == 2
        g2 = g if flat else g.reshape(-1, g.shape[-1])
        x2 = x if flat else x.reshape(-1, x.shape[-1])
        if ctx.targets[1] is None:
            summed, bias_dims = g2, ()
        elif flat or x.is_contiguous():  # torch adds the bias within the product of two matrices
            summed, bias_dims = g2, (0,)
        else:
            summed, bias_dims = g, tuple(range(g.dim() - 1))
        compute = partial(_linear_work, summed, g2, x2, column_major(weight.t()), bias_dims)
        ctx.recorder.defer(WeightWork(ctx.targets, compute, (g2, x2)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        gx = mm_left_gradient(g2, x2, weight.t())
        return gx if flat else gx.reshape(x.shape), None, None, None, None


def _embedding_work(g: Tensor, indices: Tensor, num_rows: int, options: tuple[int, bool, bool]) -> tuple[Tensor]:
    return (torch.ops.aten.embedding_backward(g, indices, num_rows, *options),)


class Embedding(torch.autograd.Function):
    """`torch.embedding`; arguments: anchor, recorder, indices, (weight,), (padding_idx, by frequency, sparse), targets."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, recorder: Recorder, indices: Tensor, operands: Any, options: Any, targets: Any
    ) -> Tensor:
        (weight,) = operands
        ctx.save_for_backward(indices)
        ctx.recorder, ctx.targets, ctx.num_rows, ctx.options = recorder, targets, weight.shape[0], options
        return torch.embedding(weight, indices, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        compute = partial(_embedding_work, g, indices, ctx.num_rows, ctx.options)
        ctx.recorder.defer(WeightWork(ctx.targets, compute, (g, indices)))
        return None, None, None, None, None, None


class Call(NamedTuple):
    """A call with its arguments flattened, and which of them are activations and weights that need gradients."""

    function: Callable[..., Tensor]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    leaves: list[Any]
    activations: tuple[int, ...]
    weights: tuple[int, ...]
    autocast: tuple[str, bool, torch.dtype]


def _run_apart(call: Call, leaves: list[Any]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run a call in a graph of its own, on detached operands."""
    own = list(leaves)
    for position in (*call.activations, *call.weights):
        own[position] = own[position].detach().requires_grad_()
    device, enabled, dtype = call.autocast
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
        arguments, keywords = call.rebuild(own)
        output = call.function(*arguments, **keywords)
    return output, [own[i] for i in call.activations], [own[i] for i in call.weights]


def _apart_work(edge: GradientEdge, weights: list[Tensor], g: Tensor) -> Sequence[Tensor | None]:
    return torch.autograd.grad([edge], weights, [g], allow_unused=True)


class Apart(torch.autograd.Function):
    """Any operator, in a small graph of its own; arguments: anchor, recorder, call, saved_by_hooks, targets, *activations.

    Under saved-tensor hooks (checkpointing) a graph built in F would ask for a recomputation of its own in B and again in W, so
    there the operator runs again in B on the recomputed operands.
    """

    @staticmethod
    def forward(
        ctx: Any, _anchor: Any, recorder: Recorder, call: Call, saved_by_hooks: bool, targets: Any, *activations: Tensor
    ) -> Tensor:
        ctx.recorder, ctx.targets, ctx.call, ctx.graph = recorder, targets, call, None
        if saved_by_hooks:
            tensors = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
            ctx.save_for_backward(*(call.leaves[i].detach() for i in tensors))
            ctx.tensors = tensors
            arguments, keywords = call.rebuild(call.leaves)
            output = call.function(*arguments, **keywords)
            ctx.call = call._replace(leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves])
        else:
            output, own, weights = _run_apart(call, call.leaves)
            ctx.graph = get_gradient_edge(output), own, weights
            ctx.call = None
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.graph is None:
            leaves = list(ctx.call.leaves)
            for position, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
                leaves[position] = tensor
            output, own, weights = _run_apart(ctx.call, leaves)
            edge = get_gradient_edge(output)
        else:
            edge, own, weights = ctx.graph
        ctx.graph = None
        gx = torch.autograd.grad([edge], own, [g], retain_graph=True, allow_unused=True) if own else ()
        ctx.recorder.defer(WeightWork(ctx.targets, partial(_apart_work, edge, weights, g), (g, *own)))
        return None, None, None, None, None, *gx
