"""Optimizer state divided among the replicas of a device (ZeRO stage 1): each steps its share and hands the values on.

Parameters are divided whole, so every optimizer sees the tensors it would see alone: those that look at a parameter's
shape or keep state of another shape (Adafactor, Muon, 8-bit state) keep their bits. `torch.distributed.optim`'s
ZeroRedundancyOptimizer divides alike, but builds the optimizer itself and consolidates its state by a pickle a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zb.execution.data_parallel import buckets

_UNDER_WAY = 4
"""Buckets that travel at the same time; bounds what a step's end holds beside the model."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Values of some parameters, on their way from the replica that has stepped them."""

    parameters: tuple[nn.Parameter, ...]
    place: int
    flat: Tensor
    work: Any


@dataclass(slots=True)
class OptimizerShards:
    """The part of one device's parameters that this replica steps and keeps optimizer state of.

    All replicas step alike, so they call `share` equally often; it has a process group of its own.

    Args:
        group: the processes that stand for this device in all replicas.
        places: for each parameter which of them steps it; what is not in it is stepped by all.
    """

    group: dist.ProcessGroup
    places: Mapping[nn.Parameter, int]
    _stepped: list[nn.Parameter] = field(default_factory=list)

    @property
    def place(self) -> int:
        """Which of the replicas this is."""
        return self.group.rank()

    def is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this replica steps the parameter and keeps its state."""
        return self.places.get(parameter, self.place) == self.place

    @contextmanager
    def own_gradients(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within it the optimizer finds gradients for this replica's share alone, and passes over the rest."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._stepped = [p for p in parameters if p.grad is not None]
        hidden = [(p, p.grad) for p in self._stepped if not self.is_mine(p)]
        for p, _ in hidden:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in hidden:
                p.grad = gradient

    @torch.no_grad()
    def share(self) -> None:
        """Give the other replicas what was stepped here, and take theirs (a collective of `group`)."""
        stepped, self._stepped = self._stepped, []
        sent: deque[_Bucket] = deque()
        for place in range(self.group.size()):
            for bucket in buckets([p for p in stepped if self.places.get(p) == place]):
                if len(sent) == _UNDER_WAY:
                    self._arrive(sent.popleft())
                sent.append(self._send(bucket, place))
        for waiting in sent:
            self._arrive(waiting)

    def _send(self, parameters: list[nn.Parameter], place: int) -> _Bucket:
        if place == self.place:
            flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        else:
            flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        source = dist.get_global_rank(self.group, place)
        work = dist.broadcast(flat, source, group=self.group, async_op=True)
        return _Bucket(tuple(parameters), place, flat, work)

    def _arrive(self, bucket: _Bucket) -> None:
        bucket.work.wait()
        if bucket.place == self.place:
            return
        for p, values in zip(bucket.parameters, bucket.flat.split([p.numel() for p in bucket.parameters]), strict=True):
            p.copy_(values.view_as(p))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors an optimizer keeps in this process; most make them in the first step."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
