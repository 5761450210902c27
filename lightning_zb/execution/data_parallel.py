"""Gradients averaged over the replicas of a pipeline, chunk by chunk while the weight passes of others still run.

A chunk's gradients are complete after its W of the last microbatch; from there they travel in buckets, asynchronously
(the first paper's Appendix A). What no single chunk answers for follows at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients under way, behind them one number a parameter: how many replicas have a gradient for it."""

    parameters: tuple[nn.Parameter, ...]
    flat: Tensor
    work: Any


@dataclass(slots=True)
class GradientReducer:
    """Averages the gradients of one device with those of the same device in the other replicas.

    All replicas run the same program, so they call in the same order. The mean of two is the same in every order of
    addition; with more replicas it may round differently from another reduction, equally on all replicas.

    Args:
        group: the processes that stand for this device in all replicas.
        num_replicas: how many.
        by_chunk: for each chunk of this device the parameters that it alone uses.
    """

    group: dist.ProcessGroup
    num_replicas: int
    by_chunk: Mapping[int, Sequence[nn.Parameter]]
    _sent: list[_Bucket] = field(default_factory=list)

    def end_chunk(self, chunk: int) -> None:
        """All gradients of a chunk are there: send them off."""
        self._send(self.by_chunk.get(chunk, ()))

    def finish(self, rest: Sequence[nn.Parameter]) -> None:
        """Send what is left and wait for everything; every `.grad` is the mean afterwards.

        Args:
            rest: all parameters of this device; those that chunks have sent are passed over.
        """
        done = {p for parameters in self.by_chunk.values() for p in parameters}
        self._send([p for p in rest if p not in done])
        for bucket in self._sent:
            bucket.work.wait()
            _take_back(bucket)
        self._sent = []

    def _send(self, parameters: Sequence[nn.Parameter]) -> None:
        for bucket in buckets([p for p in parameters if p.requires_grad]):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([g.reshape(-1) for g in gradients]).mul_(1 / self.num_replicas)
            present = torch.tensor([p.grad is not None for p in bucket], dtype=flat.dtype, device=flat.device)
            flat = torch.cat([flat, present])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self._sent.append(_Bucket(tuple(bucket), flat, work))


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one type and device, of at most `BUCKET_BYTES` where one parameter is not larger."""
    bucket: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        num_bytes = p.numel() * p.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += num_bytes
    if bucket:
        yield bucket


def _take_back(bucket: _Bucket) -> None:
    start = 0
    present = bucket.flat[bucket.flat.numel() - len(bucket.parameters) :].tolist()
    for p, count in zip(bucket.parameters, present, strict=True):
        if count:  # a parameter without a gradient in any replica keeps none, as in one process
            mean = bucket.flat[start : start + p.numel()].view_as(p)
            if p.grad is None:
                p.grad = mean.clone()
            else:
                p.grad.copy_(mean)
        start += p.numel()
