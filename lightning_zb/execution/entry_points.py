"""Wraps the functions through which modules use weights, so that calls made while F records reach their handlers.

The entry points are wrapped once, on first use; a wrapper looks at one variable and passes through at once while nothing
records. Code that took a function before (`from torch.nn.functional import linear`) escapes: its gradients are computed in B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zb.execution import weight_calls as calls
from lightning_zb.execution.weight_calls import CallRecorder


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


def _wrap(name: str, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of one entry point: to the handler while recording, to the original where the handler declines."""
    is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
    in_functorch = torch._C._are_functorch_transforms_active

    @functools.wraps(original)
    def entry(*args: Any, **kwargs: Any) -> Any:
        recorder = _Active.recorder
        if recorder is None or not is_grad_enabled() or is_compiling() or in_functorch():
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


def _wrap_clear_cache(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        if _Active.recorder is not None:
            _Active.recorder.casts.clear()
        original()

    return clear_autocast_cache


_ABSENT = object()
_installed: list[tuple[Any, str, Any]] = []


def _replace(wrapper: Any, name: str, *owners: Any) -> None:
    for owner in owners:
        _installed.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, wrapper)


def install() -> None:
    """Wrap the entry points; does nothing where they are wrapped already."""
    if _installed:
        return
    partial = functools.partial
    _replace(_wrap("linear", F.linear, calls.defer_linear), "linear", F)
    _replace(_wrap("embedding", F.embedding, calls.defer_embedding), "embedding", F)
    matmul = _wrap("matmul", torch.matmul, calls.defer_matmul)
    _replace(matmul, "matmul", torch, Tensor)
    _replace(matmul, "__matmul__", Tensor)
    for name, handler in (("mm", calls.defer_mm), ("addmm", calls.defer_addmm), ("bmm", calls.defer_bmm)):
        _replace(_wrap(name, getattr(torch, name), handler), name, torch, Tensor)
    for name, lowers in (("baddbmm", True), ("mv", False)):
        original = getattr(torch, name)
        _replace(_wrap(name, original, partial(calls.defer_call, original, lowers)), name, torch, Tensor)
    _replace(_wrap("einsum", torch.einsum, partial(calls.defer_call, torch.einsum, False)), "einsum", torch)
    for name in ("conv1d", "conv2d", "conv3d"):
        original = getattr(torch, name)
        _replace(_wrap(name, original, partial(calls.defer_convolution, original)), name, torch, F)
    if hasattr(torch, "_grouped_mm"):
        original = torch._grouped_mm
        _replace(_wrap("grouped_mm", original, partial(calls.defer_grouped, original)), "_grouped_mm", torch)
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # there once transformers' experts are imported
        original = torch.ops.transformers.grouped_mm_fallback
        wrapper = _wrap("grouped_mm_fallback", original, partial(calls.defer_looped_grouped, original))
        _replace(wrapper, "grouped_mm_fallback", torch.ops.transformers)
    _replace(_wrap_clear_cache(torch.clear_autocast_cache), "clear_autocast_cache", torch)
    _replace(_wrap_function_apply(vars(torch.autograd.Function)["apply"]), "apply", torch.autograd.Function)


def uninstall() -> None:
    """Put the original entry points back."""
    while _installed:
        owner, name, original = _installed.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
