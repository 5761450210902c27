"""Small results on their way from a device to the host, which goes on working meanwhile."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HostCopy(Protocol):
    """A tensor on its way to the host."""

    def get(self) -> Tensor:
        """Wait until it has arrived; any thread may ask."""
        ...


class _Arrived:
    """A tensor that was on the host already."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get(self) -> Tensor:
        return self._tensor


class _PinnedCopy:
    """A copy into pinned memory, and the event behind it."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        self._event.synchronize()
        return self._host


def copy_to_host(tensor: Tensor) -> HostCopy:
    """Start copying a tensor to the host; nothing waits until the copy is asked for."""
    return _PinnedCopy(tensor) if tensor.is_cuda else _Arrived(tensor)
