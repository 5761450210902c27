"""Recognises weight operands: Parameters, tensors derived from Parameters only, and their casts under autocast."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from lightning_zb.execution.deferred_ops import CastParameter, Target

_ACCUMULATE_GRAD = type(get_gradient_edge(nn.Parameter(torch.empty(0))).node)

_MAX_DERIVATION = 16
"""How many graph nodes may lie between a weight operand and its Parameters (a cast, a view, an index: one to three)."""


_CAST_OF = "_lightning_zb_weight"
"""The attribute that names the weight of a cast which has no graph of its own."""


class Weight(NamedTuple):
    """A weight operand.

    Attributes:
        target: where its gradient goes.
        parameters: those that it is derived from; itself, where it is a Parameter.
        saving: graph nodes of the derivation that hold saved tensors, which can be used once.
    """

    target: Target
    parameters: tuple[nn.Parameter, ...]
    saving: tuple[Node, ...] = ()


def find_weight(tensor: Any) -> Weight | None:
    """Tell whether an operand is a Parameter that needs a gradient, or is computed from such Parameters only.

    Custom Functions end the search, and with them every deferred operator: what comes out of them is an activation.

    Args:
        tensor: an operand of any type.

    Returns:
        The weight, or None for anything else.
    """
    kind = type(tensor)
    if kind is nn.Parameter:
        return Weight(tensor, (tensor,)) if tensor.requires_grad else None
    if kind is not Tensor:
        return None
    if tensor.grad_fn is None:
        return getattr(tensor, _CAST_OF, None)
    parameters: dict[int, nn.Parameter] = {}
    saving: list[Node] = []
    pending: list[Node] = [tensor.grad_fn]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(seen) > _MAX_DERIVATION:
            return None
        if type(node) is _ACCUMULATE_GRAD:
            leaf = node.variable  # type: ignore[attr-defined]
            if type(leaf) is not nn.Parameter:
                return None
            parameters[id(leaf)] = leaf
            continue
        if _saves_tensors(type(node)):
            saving.append(node)
        pending.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    if saving and saved_by_hooks():
        return None  # W would unpack them outside of B: one more recomputation of the checkpointed block
    return Weight(get_gradient_edge(tensor), tuple(parameters.values()), tuple(saving))


@functools.cache
def _saves_tensors(node_type: Hashable) -> bool:
    return any(name.startswith("_raw_saved_") for name in dir(node_type))


def saved_by_hooks() -> bool:
    """Whether saved tensors go through hooks now, as they do under activation checkpointing; yes where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


class Casts:
    """Casts operands as autocast would, with its rule for keeping the cast of a weight within one autocast context.

    Two uses of one kept cast add their gradients in low precision before the cast back, so this must be the same here.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget the casts, as autocast does when its outermost context ends."""
        self._kept.clear()

    def lower(self, *operands: Any) -> tuple[Any, ...]:
        """Cast the operands of an operator that autocast runs in low precision; as they are where autocast is off."""
        if not any_autocast():
            return operands
        device = next(operand.device.type for operand in operands if isinstance(operand, Tensor))
        if not torch.is_autocast_enabled(device):
            return operands
        dtype = torch.get_autocast_dtype(device)
        return tuple(self._cast(t, device, dtype) if isinstance(t, Tensor) else t for t in operands)

    def _cast(self, tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point() or tensor.dtype is torch.float64:
            return tensor
        if tensor.device.type != device:
            return tensor
        kept = tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32 and not tensor._is_view()
        if not kept or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self._kept:
            if type(tensor) is nn.Parameter:  # no graph: W casts the gradient back
                cast = tensor.detach().to(dtype).requires_grad_()
                setattr(cast, _CAST_OF, Weight(CastParameter(tensor), (tensor,)))
            else:
                cast = tensor.to(dtype)
            self._kept[key] = tensor, cast
        return self._kept[key][1]


any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
