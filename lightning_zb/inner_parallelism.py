"""Parallelism of the user's own inside layers, which a pipeline cannot run: found before training, and refused.

Layers run at different times on different devices, and their forwards may run again after a step was taken back. A
collective inside one would meet the wrong peers, or none, and hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_INSTEAD = "leave layers whole; data_parallel_size makes replicas of the pipeline, and shard_optimizer divides optimizer state"


def check_layers_are_whole(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse tensor, expert and context parallelism, FSDP, DDP and synchronised batch norms inside the module.

    Args:
        trainer: knows how many processes there are.
        module: the LightningModule.

    Raises:
        ValueError: one sentence that names the parameter or layer.
    """
    for name, p in module.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(
                f'parameter "{name}" is spread over a device mesh (tensor, expert or FSDP sharding), which chunks of a '
                f"pipeline cannot be; {_INSTEAD}"
            )
    for name, m in module.named_modules():
        if isinstance(m, torchmetrics.Metric):  # synchronised between batches, over replicas alone
            continue
        found = next((f"{what} of {size} processes" for what, size in _groups(m) if size > 1), None)
        if found is not None:
            raise ValueError(
                f'"{name}" ({type(m).__name__}) has a {found} (tensor, expert or context parallelism, FSDP or DDP inside the '
                f"module); a pipeline runs its layers at different times on different processes; {_INSTEAD}"
            )
        if isinstance(m, nn.SyncBatchNorm) and trainer.world_size > 1:
            raise ValueError(
                f'"{name}" is a SyncBatchNorm, which waits for processes that run other layers; use nn.BatchNorm, '
                "whose statistics under a pipeline are those of a microbatch, as in one process"
            )
    if getattr(trainer.strategy, "_layer_sync", None) is not None and trainer.strategy.replicas.num_replicas > 1:
        raise ValueError(
            "Trainer(sync_batchnorm=True) synchronises batch norms over replicas within a step, which a pipeline cannot; "
            "leave it out, and each replica keeps statistics of its own batches"
        )


def _groups(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Process groups and meshes that a module holds, as attributes or for its hooks: kind and size."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    for value in (*module.__dict__.values(), *(v for hook in hooks for v in _bound(hook))):
        if isinstance(value, DeviceMesh):
            yield "device mesh", value.size()
        elif isinstance(value, dist.ProcessGroup):
            yield "process group", value.size()


def _bound(hook: Any) -> Iterator[Any]:
    """What a function was given besides its arguments."""
    while isinstance(hook, partial):
        yield from hook.args
        yield from hook.keywords.values()
        hook = hook.func
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
