"""Operators whose backward computes the input gradient at once and leaves the weight gradient as work for W.

Every operator runs the kernels, operand order and layouts of autograd's own formulas (FunctionsManual.cpp), so that gradients
keep their bits. Weights travel in a tuple: a bare tensor argument would become an edge to the Parameter, whose hooks would then
fire in B with no gradient. Inputs go through `save_for_backward`, so activation checkpointing recomputes them, once, in B.

All of them are called as `apply(activation, ..., anchor, deferral)`. The anchor stands in for an activation that needs no
gradient: it gives the output a node in the graph, and nothing flows into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


class CastParameter:
    """A Parameter's cast within one autocast context, whose uses add their gradients in low precision before the cast back."""

    __slots__ = ("parameter",)

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


Target: TypeAlias = "nn.Parameter | CastParameter | GradientEdge"
"""Where a weight gradient goes: to a Parameter, through a cast, or into the graph that derives the weight from Parameters."""


class WeightWork(NamedTuple):
    """One operator's weight gradients, to be computed in W.

    Attributes:
        targets: where the gradients go; None where the operand wants none.
        compute: returns one gradient for each target.
        arguments: of compute.
        activation: the input, which must not change until W; None where autograd watches it.
        version: of the input, as it was in F.
    """

    targets: tuple[Target | None, ...]
    compute: Callable[..., Sequence[Tensor | None]]
    arguments: tuple[Any, ...]
    activation: Tensor | None = None
    version: int = 0


class Recorder(Protocol):
    """Takes the weight work of operators as their backward runs."""

    def defer(self, work: WeightWork) -> None:
        """Keep this work for W."""


class Deferral(NamedTuple):
    """What an operator needs besides its activations.

    Attributes:
        recorder: takes the work.
        targets: of the weight and, where there is one, of the bias.
        weight: the weight operand.
        bias: the bias operand, None without one.
        options: the operator's other arguments.
    """

    recorder: Recorder
    targets: tuple[Target | None, ...]
    weight: Tensor
    bias: Tensor | None = None
    options: Any = None


def column_major(matrix: Tensor) -> bool:
    """Whether autograd's formulas take the two last dimensions of a tensor as a transposed matrix."""
    stride = matrix.stride()
    return stride[-2] == 1 and stride[-1] == matrix.shape[-2]


def not_a_view(output: Tensor) -> Tensor:
    """The same tensor without its view relation, which would forbid in-place operators on a Function's output."""
    return output.detach() if output._is_view() else output


def _linear_weight(g2: Tensor, x2: Tensor, row_major: bool, summed: Tensor | None) -> Sequence[Tensor | None]:
    weight = g2.t().mm(x2) if row_major else x2.t().mm(g2).t()
    if summed is None:
        return weight, None
    return weight, summed.sum(0) if summed.dim() == 2 else summed.sum(tuple(range(summed.dim() - 1)))


class Linear(torch.autograd.Function):
    """`F.linear(x, weight, bias)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, bias, _ = deferral
        ctx.save_for_backward(x, weight.detach())
        ctx.deferred = recorder, targets
        # The weight still requires a gradient here: torch folds a strided input into one product only then.
        return not_a_view(torch._C._nn.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        recorder, targets = ctx.deferred
        flat = x.dim() == 2
        g2 = g if flat else g.reshape(-1, g.shape[-1])
        x2 = x if flat else x.reshape(-1, x.shape[-1])
        summed = None
        if targets[1] is not None:  # torch adds the bias of a strided input after the product, with the input's shape
            summed = g2 if flat or x.is_contiguous() else g
        stride = weight.stride()
        row_major = stride[1] == 1 and stride[0] == weight.shape[1]
        recorder.defer(WeightWork(targets, _linear_weight, (g2, x2, row_major, summed), x, x._version))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        gx = weight.t().mm(g2.t()).t() if column_major(x2) else g2.mm(weight)
        return gx if flat else gx.reshape(x.shape), None, None


def _product_weight(
    g: Tensor, x: Tensor, weight_is_left: bool, transposed: bool, bias_shape: torch.Size | None
) -> Sequence[Tensor | None]:
    if weight_is_left:  # autograd's mm_mat1_backward
        weight = x.mm(g.t()).t() if transposed else g.mm(x.t())
    else:  # autograd's mm_mat2_backward
        weight = g.t().mm(x).t() if transposed else x.t().mm(g)
    if bias_shape is None:
        return weight, None
    return weight, g.clone() if bias_shape == g.shape else g.sum_to_size(bias_shape)


class Product(torch.autograd.Function):
    """`torch.mm` or `torch.addmm` with a weight on one side; options: whether that is the left one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, bias, weight_is_left = deferral
        ctx.save_for_backward(x, weight.detach())
        ctx.deferred = recorder, targets, weight_is_left, None if targets[1] is None or bias is None else bias.shape
        left, right = (weight, x) if weight_is_left else (x, weight)
        added = bias if addend is None else addend
        return torch.mm(left, right) if added is None else torch.addmm(added, left, right)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        recorder, targets, weight_is_left, bias_shape = ctx.deferred
        arguments = g, x, weight_is_left, column_major(weight), bias_shape
        recorder.defer(WeightWork(targets, _product_weight, arguments, x, x._version))
        gx = None
        if ctx.needs_input_grad[0]:
            if weight_is_left:
                gx = g.t().mm(weight).t() if column_major(x) else weight.t().mm(g)
            else:
                gx = weight.mm(g.t()).t() if column_major(x) else g.mm(weight.t())
        return gx, g if ctx.needs_input_grad[1] else None, None, None


def _batched_weight(g: Tensor, x: Tensor, weight_is_left: bool) -> Sequence[Tensor]:
    return (g.bmm(x.transpose(1, 2)) if weight_is_left else x.transpose(1, 2).bmm(g),)


class BatchedProduct(torch.autograd.Function):
    """`torch.bmm` with a weight on one side; options: whether that is the left one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, _, weight_is_left = deferral
        ctx.save_for_backward(x, weight.detach())
        ctx.deferred = recorder, targets, weight_is_left
        return torch.bmm(weight, x) if weight_is_left else torch.bmm(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        recorder, targets, weight_is_left = ctx.deferred
        recorder.defer(WeightWork(targets, _batched_weight, (g, x, weight_is_left), x, x._version))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        transposed = weight.transpose(1, 2)
        return transposed.bmm(g) if weight_is_left else g.bmm(transposed), None, None


def _embedding_weight(g: Tensor, indices: Tensor, num_rows: int, options: tuple[int, bool, bool]) -> Sequence[Tensor]:
    return (torch.ops.aten.embedding_backward(g, indices, num_rows, *options),)


class Embedding(torch.autograd.Function):
    """`torch.embedding(weight, indices, *options)`; the options are padding_idx, scale_grad_by_freq and sparse."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, _anchor: Tensor, deferral: Deferral) -> Tensor:
        recorder, targets, weight, _, options = deferral
        ctx.save_for_backward(indices)
        ctx.deferred = recorder, targets, weight.shape[0], options
        return torch.embedding(weight, indices, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        recorder, targets, num_rows, options = ctx.deferred
        arguments = g, indices, num_rows, options
        recorder.defer(WeightWork(targets, _embedding_weight, arguments, indices, indices._version))
        return None, None, None


class ConvolutionOptions(NamedTuple):
    """A convolution's function and arguments, one entry a dimension."""

    function: Callable[..., Tensor]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def _convolution_gradients(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, options: ConvolutionOptions, wanted: list[bool]
) -> Sequence[Tensor | None]:
    _, stride, padding, dilation, groups = options
    backward = torch.ops.aten.convolution_backward
    return backward(g, x, weight, bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups, wanted)


def _convolution_weight(*arguments: Any) -> Sequence[Tensor | None]:
    return _convolution_gradients(*arguments)[1:]


class Convolution(torch.autograd.Function):
    """`F.conv1d`, `conv2d` or `conv3d` of a batch; options: ConvolutionOptions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, bias, options = deferral
        ctx.save_for_backward(x, weight.detach())
        ctx.deferred = recorder, targets, None if bias is None else list(bias.shape), options
        return not_a_view(options.function(x, weight, bias, *options[1:]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        recorder, targets, bias_sizes, options = ctx.deferred
        arguments = g, x, weight, bias_sizes, options, [False, True, targets[1] is not None]
        recorder.defer(WeightWork(targets, _convolution_weight, arguments, x, x._version))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _convolution_gradients(g, x, weight, bias_sizes, options, [True, False, False])[0], None, None


def _grouped_weight(g: Tensor, x: Tensor, offsets: Tensor | None, transposed: bool, product: Any) -> Sequence[Tensor]:
    if transposed:
        return (product(g.transpose(-2, -1), x, offs=offsets).transpose(-2, -1),)
    return (product(x.transpose(-2, -1), g, offs=offsets),)


class GroupedProduct(torch.autograd.Function):
    """`torch._grouped_mm(x, weight, offs)`, one weight matrix a group of rows; options: that function and the offsets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, _, (product, offsets) = deferral
        ctx.save_for_backward(x, weight.detach(), offsets)
        ctx.deferred = recorder, targets, product
        return product(x, weight, offs=offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        recorder, targets, product = ctx.deferred
        arguments = g, x, offsets, column_major(weight), product
        recorder.defer(WeightWork(targets, _grouped_weight, arguments, x, x._version))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if column_major(x):
            return product(weight, g.transpose(-2, -1), offs=offsets).transpose(-2, -1), None, None
        return product(g, weight.transpose(-2, -1), offs=offsets), None, None


def _looped_weight(g: Tensor, x: Tensor, offsets: Tensor, like: Tensor) -> Sequence[Tensor]:
    gradient, start = torch.zeros_like(like), 0
    for group, end in enumerate(offsets.tolist()):
        if start != end:
            torch.mm(x[start:end].T, g[start:end], out=gradient[group])
        start = end
    return (gradient,)


class LoopedGroupedProduct(torch.autograd.Function):
    """transformers' `grouped_mm_fallback(x, weight, offsets)`, one product a group; options: that function and the offsets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor | None, deferral: Deferral) -> Tensor:
        recorder, targets, weight, _, (product, offsets) = deferral
        ctx.save_for_backward(x, weight.detach(), offsets)
        ctx.deferred = recorder, targets
        return product(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        recorder, targets = ctx.deferred
        recorder.defer(WeightWork(targets, _looped_weight, (g, x, offsets, weight), x, x._version))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        gx, start = torch.zeros_like(x), 0
        for group, end in enumerate(offsets.tolist()):
            if start != end:
                torch.mm(g[start:end], weight[group].T, out=gx[start:end])
            start = end
        return gx, None, None
