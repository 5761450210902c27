"""Counts the bytes that autograd and deferred weight work hold, each storage once, without parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def parameter_storages(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """The storages of the parameters that have memory on this device."""
    return frozenset(storage_key(p) for p in parameters if not p.is_meta)


class Held:
    """A tensor that counts for as long as this object lives."""

    __slots__ = ("_key", "_meter", "tensor")

    def __init__(self, tensor: Tensor, meter: LiveBytes, key: int) -> None:
        self.tensor, self._meter, self._key = tensor, meter, key

    def __del__(self) -> None:
        self._meter.release(self._key)


class LiveBytes:
    """Bytes held now and at most by one device.

    Args:
        ignored: storages that do not count: parameters.
    """

    def __init__(self, ignored: frozenset[int]) -> None:
        self.ignored = ignored
        self.now = 0
        self.peak = 0
        self._since, self._highest = 0, 0
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def hold(self, tensor: Tensor) -> Held | None:
        """Count a tensor's storage until the returned object dies; None for what does not count."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return None
        key = storage_key(tensor)
        if key in self.ignored:
            return None
        if key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self._holders[key] = 0
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            self._highest = max(self._highest, self.now)
        self._holders[key] += 1
        return Held(tensor, self, key)

    def release(self, key: int) -> None:
        """One object that held the storage died."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= self._sizes.pop(key)

    def watch(self) -> None:
        """Let `rise` begin anew."""
        self._since = self._highest = self.now

    @property
    def rise(self) -> int:
        """The most bytes held since `watch`, beyond those held then and now."""
        return self._highest - max(self._since, self.now)

    def hooks(self, note: Callable[[int, int], None]) -> saved_tensors_hooks:
        """Inside, count what autograd saves.

        Args:
            note: told `storage_key` and bytes of each storage saved, those that do not count included.
        """

        def pack(tensor: Tensor) -> Any:
            if tensor.layout is torch.strided:
                note(storage_key(tensor), tensor.untyped_storage().nbytes())
            held = self.hold(tensor)
            return tensor if held is None else held

        return saved_tensors_hooks(pack, lambda packed: packed.tensor if isinstance(packed, Held) else packed)
