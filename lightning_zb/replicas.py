"""Data parallel x pipeline: which process stands where, and which share of the data it reads.

Global ranks run through one pipeline after the other, so the devices of a pipeline, which talk after every pass, are
neighbours (one node, where it holds them); those that hold the same chunks of different replicas, which talk once a
chunk and step, are a pipeline's length apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The processes that stand for the same device in all replicas, while they divide its optimizer state.

    Args:
        values: for parameters after a step; apart from the group of gradients, since steps may be shared at other times.
        objects: for what goes over the CPU.
    """

    values: dist.ProcessGroup
    objects: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Replicas:
    """Where this process stands.

    Args:
        num_replicas: pipelines, each with the whole model.
        pipeline_size: processes of a pipeline.
        rank: this process among all.
    """

    num_replicas: int
    pipeline_size: int
    rank: int

    @classmethod
    def of(cls, world_size: int, num_replicas: int, rank: int) -> Replicas:
        """Divide the processes of a job.

        Raises:
            ValueError: they cannot be divided.
        """
        if num_replicas < 1 or world_size % num_replicas:
            raise ValueError(
                f"data_parallel_size={num_replicas} does not divide the {world_size} processes; "
                "set Trainer(devices=..., num_nodes=...) to a multiple of it"
            )
        return cls(num_replicas, world_size // num_replicas, rank)

    @property
    def replica(self) -> int:
        """Which replica this process belongs to."""
        return self.rank // self.pipeline_size

    @property
    def local_rank(self) -> int:
        """This process within its pipeline; the loss is on 0."""
        return self.rank % self.pipeline_size

    @property
    def first_rank(self) -> int:
        """The global rank of the first process of this pipeline."""
        return self.replica * self.pipeline_size

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of this pipeline."""
        return tuple(range(self.first_rank, self.first_rank + self.pipeline_size))

    def pipelines(self, local_ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """For each pipeline the global ranks of its devices, given those within one pipeline."""
        return [tuple(r * self.pipeline_size + local for local in local_ranks) for r in range(self.num_replicas)]

    def open_peers(self, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
        """The group of the processes that stand for the same device in all replicas (a collective); None for one replica."""
        if self.num_replicas == 1:
            return None
        mine = None
        for local in range(self.pipeline_size):
            ranks = [replica * self.pipeline_size + local for replica in range(self.num_replicas)]
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            mine = group if local == self.local_rank else mine
        return mine

    def open_shards(self, timeout: timedelta) -> ShardGroups | None:
        """Groups of the same processes for optimizer state that they divide (a collective); None for one replica."""
        values, objects = self.open_peers(timeout), self.open_peers(timeout, backend="gloo")
        return None if values is None or objects is None else ShardGroups(values, objects)

    def open_pipeline(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """A CPU group of this pipeline (a collective); None where it is one process."""
        if self.pipeline_size == 1:
            return None
        mine = None
        for replica in range(self.num_replicas):
            ranks = [replica * self.pipeline_size + local for local in range(self.pipeline_size)]
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            mine = group if replica == self.replica else mine
        return mine


def share_out(loader: Any, replicas: Replicas, trainer: Any) -> Any:
    """Let a loader read this replica's share, and draw alike in the workers of all processes of a pipeline.

    Shuffled loaders stay shuffled and ordered ones ordered; iterable datasets and loaders with a distributed sampler of
    their own divide their data themselves.

    Args:
        loader: the user's loader.
        replicas: where this process stands.
        trainer: knows the stage, and whether samplers may be replaced at all.
    """
    if not isinstance(loader, DataLoader):
        return loader
    mode = RunningStage.SANITY_CHECKING if trainer.sanity_checking else trainer.state.stage
    divides_itself = has_iterable_dataset(loader) or isinstance(loader.sampler, DistributedSampler)
    if replicas.num_replicas > 1 and trainer._accelerator_connector.use_distributed_sampler and not divides_itself:
        sampler = _get_distributed_sampler(
            loader,
            shuffle=not isinstance(loader.sampler, SequentialSampler),
            overfit_batches=trainer.overfit_batches,
            mode=mode,
            num_replicas=replicas.num_replicas,
            rank=replicas.replica,
        )
        loader = _update_dataloader(loader, sampler, mode=mode)
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replicas.replica)
    return loader


class BroadcastLoader:
    """The batches of the first process's loader, on all processes of a pipeline.

    For data that cannot be read alike everywhere: iterable datasets that split by rank, collators that draw numbers of
    their own. A batch travels as a pickle; the other processes' loaders are never started.

    Args:
        loader: the user's loader.
        replicas: where this process stands.
        group: of the pipeline, on the CPU.
    """

    def __init__(self, loader: Any, replicas: Replicas, group: dist.ProcessGroup) -> None:
        self._loader, self._replicas, self._group = loader, replicas, group
        self._length = self._share(_length(loader))

    def __iter__(self) -> Iterator[Any]:
        if self._replicas.local_rank:
            while (found := self._share(None)) is not None:
                yield found[0]
            return
        for batch in self._loader:
            self._share((batch,))
            yield batch
        self._share(None)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _share(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, self._replicas.first_rank, group=self._group)
        return box[0]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
