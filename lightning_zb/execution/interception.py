"""Finds the calls that use weights while F runs, and hands them to the deferred operators.

The entry points are wrapped once, on first use; a wrapper looks at one variable and passes through at once while nothing
records. Code that took a function before (`from torch.nn.functional import linear`) escapes: its gradients are computed in B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_zb.execution import deferred_ops as ops
from lightning_zb.execution.deferred_ops import Target

_ACCUMULATE_GRAD = type(get_gradient_edge(nn.Parameter(torch.empty(0))).node)

_MAX_DERIVATION = 16
"""How many graph nodes may lie between a weight operand and its Parameters (a cast, a view, an index: one to three)."""

_ANCHOR = torch.empty(0, requires_grad=True)
"""Gives a node to operators whose activations need no gradient; nothing ever flows into it."""


class CallRecorder(ops.Recorder, Protocol):
    """What interception needs to know of the record of one F."""

    casts: dict[tuple[int, torch.dtype], Tensor]

    def note_deferred(self, target: Target, parameters: tuple[nn.Parameter, ...]) -> None:
        """These parameters have weight work under this target."""

    def note_kept(self, name: str) -> None:
        """An operator with a parameter stays whole in B."""


class _Active:
    """The record that takes calls now; one for the process, since CUDA's backward recomputes in a thread of its own."""

    recorder: CallRecorder | None = None


@contextmanager
def recording_into(recorder: CallRecorder) -> Iterator[None]:
    """Hand the calls that use weights to this recorder."""
    install()
    previous, _Active.recorder = _Active.recorder, recorder
    try:
        yield
    finally:
        _Active.recorder = previous
        recorder.casts.clear()


class Weight(NamedTuple):
    """A weight operand: its target, and the parameters that it is derived from."""

    target: Target
    parameters: tuple[nn.Parameter, ...]


def find_weight(tensor: Any) -> Weight | None:
    """Tell whether an operand is a Parameter that needs a gradient, or is computed from such Parameters only.

    Custom Functions end the search, and with them every deferred operator: what comes out of them is an activation.
    """
    kind = type(tensor)
    if kind is nn.Parameter:
        return Weight(tensor, (tensor,)) if tensor.requires_grad else None
    if kind is not Tensor or tensor.grad_fn is None:
        return None
    parameters: dict[int, nn.Parameter] = {}
    pending, seen = [tensor.grad_fn], set()
    saves_tensors = False
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
        saves_tensors = saves_tensors or _saves_tensors(type(node))
        pending.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    if saves_tensors and saved_by_hooks():
        return None  # W would unpack them outside of B: one more recomputation of the checkpointed block
    return Weight(get_gradient_edge(tensor), tuple(parameters.values()))


@functools.cache
def _saves_tensors(node_type: type) -> bool:
    return any(name.startswith("_raw_saved_") for name in dir(node_type))


def saved_by_hooks() -> bool:
    """Whether saved tensors go through hooks now, as they do under activation checkpointing; yes where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def _plain(tensor: Any) -> bool:
    """Whether this is a dense tensor of torch's own type; subclasses and sparse tensors keep their own rules."""
    return (type(tensor) is Tensor or type(tensor) is nn.Parameter) and tensor.layout is torch.strided


def _lowered(recorder: CallRecorder, tensor: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast an operand as autocast would, with its rule for keeping the cast of a weight within one context.

    Two uses of one kept cast add their gradients in low precision before the cast back, so this must be the same here.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype is dtype or not tensor.is_floating_point():
        return tensor
    if tensor.dtype is torch.float64 or tensor.device.type != device:
        return tensor
    kept = (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not kept:
        return tensor.to(dtype)
    key = id(tensor), dtype
    if key not in recorder.casts:
        recorder.casts[key] = tensor.to(dtype)
    return recorder.casts[key]


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """`function.apply` without the Python layer that serves functorch, which never gets here."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


_linear = _apply(ops.Linear)
_embedding = _apply(ops.Embedding)
_apart = _apply(ops.Apart)


def _defer_linear(recorder: CallRecorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not weight.requires_grad or not (_plain(input) and _plain(weight)) or weight.dim() != 2 or weight.is_complex():
        return NotImplemented
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input = _lowered(recorder, input, device, dtype)
        weight = _lowered(recorder, weight, device, dtype)
        bias = _lowered(recorder, bias, device, dtype)
    found = find_weight(weight)
    if found is None:
        return NotImplemented
    bias_target = None
    if bias is not None and bias.requires_grad:
        found_bias = find_weight(bias)
        if found_bias is None:
            return NotImplemented
        recorder.note_deferred(*found_bias)
        bias_target = found_bias.target
    recorder.note_deferred(*found)
    anchor = None if input.requires_grad else _ANCHOR
    return _linear(input, anchor, recorder, (weight, bias), (found.target, bias_target))


def _defer_embedding(
    recorder: CallRecorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not weight.requires_grad or not (_plain(input) and _plain(weight)) or max_norm is not None:
        return NotImplemented
    found = find_weight(weight)
    num_rows = weight.shape[0]
    if found is None or (padding_idx is not None and not -num_rows <= padding_idx < num_rows):
        return NotImplemented
    recorder.note_deferred(*found)
    padding = -1 if padding_idx is None else padding_idx % num_rows
    return _embedding(_ANCHOR, recorder, input, (weight,), (padding, scale_grad_by_freq, sparse), (found.target,))


def _defer_apart(original: Callable[..., Any], lowers: bool, recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    """Defer any operator through a small graph of its own.

    Args:
        original: the operator.
        lowers: whether autocast runs it in low precision.
        recorder: the record of this F.
        args: the operator's arguments.
        kwargs: the operator's keywords.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if "out" in kwargs or not all(_plain(tensor) for tensor in tensors):
        return NotImplemented
    device = tensors[0].device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    if lowers and enabled:
        leaves = [_lowered(recorder, leaf, device, dtype) for leaf in leaves]
    weights = {i: found for i, leaf in enumerate(leaves) if (found := find_weight(leaf)) is not None}
    others = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in weights]
    if not weights or not others:
        return NotImplemented
    for found in weights.values():
        recorder.note_deferred(*found)
    activations = tuple(i for i in others if leaves[i].requires_grad)
    call = ops.Call(
        original,
        functools.partial(_unflatten, structure),
        leaves,
        activations,
        tuple(weights),
        (device, enabled, dtype),
    )
    anchor = None if activations else _ANCHOR
    targets = tuple(found.target for found in weights.values())
    return _apart(anchor, recorder, call, saved_by_hooks(), targets, *(leaves[i] for i in activations))


def _unflatten(structure: Any, leaves: list[Any]) -> Any:
    return tree_unflatten(leaves, structure)


def _wrap(name: str, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of one entry point: to the handler while recording, to the original where the handler declines."""

    @functools.wraps(original)
    def entry(*args: Any, **kwargs: Any) -> Any:
        recorder = _Active.recorder
        if (
            recorder is None
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
        ):
            return original(*args, **kwargs)
        result = handler(recorder, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if any(type(arg) is nn.Parameter and arg.requires_grad for arg in args):
            recorder.note_kept(name)
        return original(*args, **kwargs)

    return entry


def _wrap_function_apply(original: Any) -> Any:
    """Count custom Functions that take a Parameter: they stay whole in B."""

    @functools.wraps(original.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _Active.recorder
        if recorder is not None and any(type(arg) is nn.Parameter and arg.requires_grad for arg in args):
            recorder.note_kept(cls.__name__)
        return original.__func__(cls, *args, **kwargs)

    return classmethod(apply)


def _clear_casts(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        if _Active.recorder is not None:
            _Active.recorder.casts.clear()
        original()

    return clear_autocast_cache


_MATRIX_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "mv")
_installed: list[tuple[Any, str, Any, bool]] = []


def _replace(owner: Any, name: str, wrapper: Any) -> None:
    inherited = name not in vars(owner)
    _installed.append((owner, name, vars(owner).get(name), inherited))
    setattr(owner, name, wrapper)


def install() -> None:
    """Wrap the entry points; does nothing where they are wrapped already."""
    if _installed:
        return
    _replace(F, "linear", _wrap("linear", F.linear, _defer_linear))
    _replace(F, "embedding", _wrap("embedding", F.embedding, _defer_embedding))
    for name in _MATRIX_PRODUCTS:
        original = getattr(torch, name)
        entry = _wrap(name, original, functools.partial(_defer_apart, original, True))
        _replace(torch, name, entry)
        _replace(Tensor, name, entry)
    _replace(Tensor, "__matmul__", vars(Tensor)["matmul"])
    _replace(torch, "einsum", _wrap("einsum", torch.einsum, functools.partial(_defer_apart, torch.einsum, False)))
    for name in ("conv1d", "conv2d", "conv3d"):
        original = getattr(torch, name)
        entry = _wrap(name, original, functools.partial(_defer_apart, original, True))
        _replace(torch, name, entry)
        _replace(F, name, entry)
    _replace(torch, "clear_autocast_cache", _clear_casts(torch.clear_autocast_cache))
    _replace(torch.autograd.Function, "apply", _wrap_function_apply(vars(torch.autograd.Function)["apply"]))


def uninstall() -> None:
    """Put the original entry points back."""
    while _installed:
        owner, name, original, inherited = _installed.pop()
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
