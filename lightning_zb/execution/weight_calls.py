"""Hands calls that use weights to the deferred operators, one handler an operator.

A handler returns NotImplemented for calls that stay whole in B: no weight, only weights, subclasses, sparse or complex tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_zb.execution import deferred_ops as ops
from lightning_zb.execution.deferred_call import Call, DeferredCall
from lightning_zb.execution.weights import Casts, Weight, any_autocast, find_weight, saved_by_hooks

_ANCHOR = torch.empty(0, requires_grad=True)
_STRIDED = torch.strided


class CallRecorder(ops.Recorder, Protocol):
    """What interception needs to know of the record of one F."""

    casts: Casts
    note_parameter: Callable[[nn.Parameter], None]
    """This parameter, itself an operand, has work for W."""

    def note_deferred(self, weight: Weight) -> None:
        """This weight has work for W."""

    def note_kept(self, name: str) -> None:
        """An operator with a parameter stays whole in B."""


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """`function.apply` without the Python layer that serves functorch, which never gets here."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


_linear = _apply(ops.Linear)
_product = _apply(ops.Product)
_batched_product = _apply(ops.BatchedProduct)
_embedding = _apply(ops.Embedding)
_convolution = _apply(ops.Convolution)
_grouped_product = _apply(ops.GroupedProduct)
_looped_grouped_product = _apply(ops.LoopedGroupedProduct)
_call = _apply(DeferredCall)


def _plain(*tensors: Any) -> bool:
    """Whether these are dense real tensors of torch's own types; subclasses, sparse and complex tensors keep their rules."""
    for tensor in tensors:
        kind = type(tensor)
        if (kind is not Tensor and kind is not nn.Parameter) or tensor.layout is not _STRIDED or tensor.is_complex():
            return False
    return True


def _anchor(*activations: Tensor | None) -> Tensor | None:
    return None if any(x is not None and x.requires_grad for x in activations) else _ANCHOR


def _deferral(
    recorder: CallRecorder, weight: Tensor, found: Weight, bias: Tensor | None = None, options: Any = None
) -> ops.Deferral | None:
    """Note that a weight and its bias have work for W; None where the bias is an activation."""
    bias_target = None
    if bias is not None and bias.requires_grad:
        found_bias = find_weight(bias)
        if found_bias is None:
            return None
        recorder.note_deferred(found_bias)
        bias_target = found_bias.target
    recorder.note_deferred(found)
    return ops.Deferral(recorder, (found.target, bias_target), weight, bias, options)


class _Operands(NamedTuple):
    """The two operands of a product, one of them a weight."""

    x: Tensor
    weight: Tensor
    found: Weight
    weight_is_left: bool


def _tell_apart(left: Tensor, right: Tensor) -> _Operands | None:
    """Which operand is the weight; None where neither is, or both are."""
    found_left = find_weight(left) if left.requires_grad else None
    found_right = find_weight(right) if right.requires_grad else None
    if found_right is not None:
        return None if found_left is not None else _Operands(left, right, found_right, False)
    return None if found_left is None else _Operands(right, left, found_left, True)


def defer_linear(recorder: CallRecorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not weight.requires_grad or not _plain(input, weight) or weight.dim() != 2:
        return NotImplemented
    if type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter) and not any_autocast():
        # The common case, and the one where every microsecond of Python shows.
        recorder.note_parameter(weight)
        bias_target = None
        if bias is not None and bias.requires_grad:
            recorder.note_parameter(bias)
            bias_target = bias
        anchor = None if input.requires_grad else _ANCHOR
        return _linear(input, anchor, ops.Deferral(recorder, (weight, bias_target), weight, bias))
    input, weight, bias = recorder.casts.lower(input, weight, bias)
    found = find_weight(weight)
    deferral = None if found is None else _deferral(recorder, weight, found, bias)
    return NotImplemented if deferral is None else _linear(input, _anchor(input), deferral)


def defer_matmul(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    """Fold a batch as torch's matmul does where the matrix needs a gradient, so that one product is left."""
    if len(args) != 2 or kwargs or not _plain(*args):
        return NotImplemented
    operands = _tell_apart(*recorder.casts.lower(*args))
    if operands is None:
        return NotImplemented
    x, weight, found, weight_is_left = operands
    deferral = _deferral(recorder, weight, found, options=weight_is_left)
    if weight.dim() == 2 and x.dim() == 2:
        return _product(x, None, _anchor(x), deferral)
    if weight.dim() == 3 and x.dim() == 3 and x.shape[0] == weight.shape[0]:
        return _batched_product(x, _anchor(x), deferral)
    if weight.dim() != 2 or x.dim() < 3:
        return defer_call(torch.matmul, True, recorder, *args)
    rows = x.mT if weight_is_left else x
    folded = rows.reshape(-1, rows.shape[-1])
    if not weight_is_left:
        output = _product(folded, None, _anchor(x), deferral)
        return torch.ops.aten._unsafe_view(output, (*rows.shape[:-1], weight.shape[1]))
    output = _linear(folded, _anchor(x), deferral)  # (W x)^T = x^T W^T
    return torch.ops.aten._unsafe_view(output, (*rows.shape[:-1], weight.shape[0])).mT.contiguous()


def defer_mm(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 2 or kwargs or not _plain(*args):
        return NotImplemented
    operands = _tell_apart(*recorder.casts.lower(*args))
    if operands is None or operands.x.dim() != 2:
        return NotImplemented
    x, weight, found, weight_is_left = operands
    return _product(x, None, _anchor(x), _deferral(recorder, weight, found, options=weight_is_left))


def defer_addmm(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 3 or not _plain(*args):
        return NotImplemented
    if kwargs:
        return defer_call(torch.addmm, True, recorder, *args, **kwargs)
    added, left, right = recorder.casts.lower(*args)
    operands = _tell_apart(left, right)
    if operands is None or operands.x.dim() != 2:
        return NotImplemented
    x, weight, found, weight_is_left = operands
    addend = added if added.requires_grad and find_weight(added) is None else None
    deferral = _deferral(recorder, weight, found, added if addend is None else None, weight_is_left)
    return _product(x, addend, _anchor(x, addend), deferral)


def defer_bmm(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 2 or kwargs or not _plain(*args):
        return NotImplemented
    operands = _tell_apart(*recorder.casts.lower(*args))
    if operands is None or operands.x.dim() != 3:
        return NotImplemented
    x, weight, found, weight_is_left = operands
    return _batched_product(x, _anchor(x), _deferral(recorder, weight, found, options=weight_is_left))


def defer_embedding(
    recorder: CallRecorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not weight.requires_grad or not _plain(input, weight) or max_norm is not None:
        return NotImplemented
    found = find_weight(weight)
    num_rows = weight.shape[0]
    if found is None or (padding_idx is not None and not -num_rows <= padding_idx < num_rows):
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % num_rows
    return _embedding(input, _ANCHOR, _deferral(recorder, weight, found, options=(padding, scale_grad_by_freq, sparse)))


def defer_convolution(
    original: Callable[..., Tensor],
    recorder: CallRecorder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not weight.requires_grad or not _plain(input, weight):
        return NotImplemented
    if isinstance(padding, str) or input.dim() != weight.dim():
        return defer_call(original, True, recorder, input, weight, bias, stride, padding, dilation, groups)
    input, weight, bias = recorder.casts.lower(input, weight, bias)
    found = find_weight(weight)
    if found is None:
        return NotImplemented
    num_dims = weight.dim() - 2
    stride, padding, dilation = (
        [v] * num_dims if isinstance(v, int) else list(v) * (num_dims // len(v)) for v in (stride, padding, dilation)
    )
    deferral = _deferral(recorder, weight, found, bias, ops.ConvolutionOptions(original, stride, padding, dilation, groups))
    return NotImplemented if deferral is None else _convolution(input, _anchor(input), deferral)


def defer_grouped(
    original: Callable[..., Tensor],
    recorder: CallRecorder,
    input: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if not weight.requires_grad or not _plain(input, weight) or weight.dim() != 3 or bias is not None or out_dtype is not None:
        return NotImplemented
    found = find_weight(weight)
    if found is None:
        return NotImplemented
    return _grouped_product(input, _anchor(input), _deferral(recorder, weight, found, options=(original, offs)))


def defer_looped_grouped(
    original: Callable[..., Tensor], recorder: CallRecorder, input: Tensor, weight: Tensor, offs: Tensor
) -> Any:
    if not weight.requires_grad or not _plain(input, weight):
        return NotImplemented
    found = find_weight(weight)
    if found is None:
        return NotImplemented
    return _looped_grouped_product(input, _anchor(input), _deferral(recorder, weight, found, options=(original, offs)))


def defer_call(original: Callable[..., Any], lowers: bool, recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    """Defer any operator through a small graph of its own.

    Args:
        original: the operator.
        lowers: whether autocast runs it in low precision as a whole.
        recorder: the record of this F.
        args: the operator's arguments.
        kwargs: the operator's keywords.
    """
    leaves, structure = tree_flatten((args, kwargs))
    if "out" in kwargs or not _plain(*(leaf for leaf in leaves if isinstance(leaf, Tensor))):
        return NotImplemented
    if lowers:
        leaves = list(recorder.casts.lower(*leaves))
    weights = {i: found for i, leaf in enumerate(leaves) if (found := find_weight(leaf)) is not None}
    others = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in weights]
    if not weights or not others:
        return NotImplemented
    for found in weights.values():
        recorder.note_deferred(found)
    activations = tuple(i for i in others if leaves[i].requires_grad)
    device = leaves[others[0]].device.type
    autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    call = Call(original, structure, leaves, activations, tuple(weights), autocast)
    targets = tuple(found.target for found in weights.values())
    anchor = None if activations else _ANCHOR
    return _call(anchor, recorder, targets, call, saved_by_hooks(), *(leaves[i] for i in activations))
