"""The collectives that Lightning calls, over the right processes: all, one pipeline, or the replicas of one device."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor

from lightning_zb.replicas import Replicas, ShardGroups

_STARTING = timedelta(minutes=5)
"""How long processes may take to find each other and to plan, however short transfers are."""


class PipelineCommunication(ParallelStrategy):
    """Ranks, process groups and collectives of data parallel x pipeline; what runs on them is the subclass's.

    After an exception no collective is entered any more: the other processes may never answer.
    """

    is_distributed = False  # no sampler injection by Lightning: it would divide the data over pipelines, and shuffle it
    num_nodes = 1
    data_parallel_size = 1
    process_group_backend: str | None = None
    """What the default group and the replicas' run on; None: what suits the device."""
    peers: dist.ProcessGroup | None = None
    """The processes that stand for the same device in all replicas; None for one replica."""
    everyone: dist.ProcessGroup | None = None
    """All processes, on the CPU; None for one process."""
    shard_optimizer = False
    shard_groups: ShardGroups | None = None
    """The groups over which `peers` divide optimizer state; None where they do not."""
    pipeline_group: dist.ProcessGroup | None = None
    """The processes of this pipeline, on the CPU; None where it is one process."""

    @property
    def replicas(self) -> Replicas:
        """Where this process stands."""
        return Replicas.of(self.world_size, self.data_parallel_size, self.global_rank)

    @property
    def has_loss(self) -> bool:
        """Whether this process runs the last chunk, and so sees outputs and the loss."""
        return self.replicas.local_rank == 0

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas.num_replicas, "rank": self.replicas.replica}

    def open_connections(self, timeout: timedelta) -> None:
        """Set ranks and open the process groups.

        Args:
            timeout: how long a collective may take.

        Raises:
            ValueError: data_parallel_size does not divide the processes.
        """
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utilities_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        replicas = self.replicas
        if self.world_size > 1:
            backend = self.process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
            _init_dist_connection(self.cluster_environment, backend, timeout=max(timeout, _STARTING))
            atexit.register(_destroy_process_group)  # Lightning does this for NCCL only; gloo aborts at exit otherwise
            self.everyone = dist.new_group(timeout=timeout, backend="gloo")
            self.peers = replicas.open_peers(timeout)
            self.shard_groups = replicas.open_shards(timeout) if self.shard_optimizer else None
            self.pipeline_group = replicas.open_pipeline(timeout)

    # -- over all processes ----------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self._can_communicate:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._can_communicate:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._can_communicate:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    # -- over one pipeline -----------------------------------------------------------------------------------------

    def broadcast_loss_rank(self, obj: Any) -> Any:
        """Give every process of the pipeline the value of the one that sees the loss."""
        if self.pipeline_group is None or not self._can_communicate:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, self.replicas.first_rank, group=self.pipeline_group)
        return box[0]

    # -- over replicas ---------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas; a pipeline is one of them, whatever its number of processes."""
        if self.peers is None or not isinstance(tensor, Tensor) or not self._can_communicate:
            return tensor
        return _sync_ddp_if_available(tensor, group=self.peers, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from replicas: unchanged for one, else with a leading dimension of `data_parallel_size`."""
        if self.peers is None or not self._can_communicate:
            return tensor
        return _all_gather_ddp_if_available(tensor, group=self.peers, sync_grads=sync_grads)

    # -- after an exception ----------------------------------------------------------------------------------------

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception ended the run, so that other ranks may no longer answer."""
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED and self.world_size > 1

    @property
    def _can_communicate(self) -> bool:
        return dist.is_initialized() and self.world_size > 1 and not self.is_interrupted


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
