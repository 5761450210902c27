"""What Lightning saves and loads: one consolidated file, equal to the plain Trainer's, or a sharded directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_zb import sharded_checkpoint
from lightning_zb.model import state
from lightning_zb.pipeline import Pipeline


class Checkpoints:
    """Parts of checkpoints that a pipeline holds; every method but `load_*` is a collective.

    Args:
        pipeline: the running pipeline.
        sharded: write directories, in which every process writes what it holds.
        everyone: all processes, which write together where replicas divide optimizer state, and where each is one process.
    """

    def __init__(self, pipeline: Pipeline, sharded: bool, everyone: dist.ProcessGroup | None = None) -> None:
        self._pipeline, self._sharded = pipeline, sharded
        replicas, self._divides = pipeline.replicas, pipeline.shard_groups is not None
        is_alone = replicas.num_replicas > 1 and replicas.pipeline_size == 1  # its only group is that of all processes
        self._everyone = everyone if self._divides or (sharded and is_alone) else None
        self._is_first = replicas.replica == 0  # the others hold the same weights
        self._writes = self._is_first or self._everyone is not None

    def state_dict(self) -> dict[str, Any]:
        """The module's: the whole model's on the first rank and {} elsewhere, or the own part where sharded."""
        pipeline = self._pipeline
        pipeline.flush()
        if not self._is_first:
            return {}
        if self._sharded:
            held = state.held_keys(pipeline.module, pipeline.ownership)
            return {key: value for key, value in pipeline.module.state_dict().items() if key in held}
        return state.consolidated_state_dict(pipeline.module, pipeline.ownership, pipeline.gather)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's: all states on the first rank and {} elsewhere, or the own part where sharded."""
        self._pipeline.flush()
        if not (self._is_first or self._divides):
            return {}
        if self._sharded:
            return _plain(optimizer).state_dict()
        return state.consolidated_optimizer_state(_plain(optimizer), self._gather)

    def save(self, checkpoint: dict[str, Any], path: Path, optimizers: Sequence[Any]) -> None:
        """Write a checkpoint directory."""
        if not self._writes:
            return
        if not (self._is_first or self._divides):
            checkpoint = {**checkpoint, "optimizer_states": []}
        module = self._pipeline.module
        names = {id(p): name for name, p in module.named_parameters()}
        ordered = [[names[id(p)] for p in _parameters(optimizer)] for optimizer in optimizers]
        keys = list(module.state_dict())
        sharded_checkpoint.save(checkpoint, path, keys, ordered, self._gather, self._everyone or self._group)

    def load(self, path: Path, optimizers: Sequence[Any], weights_only: bool | None) -> dict[str, Any]:
        """Read the own part of a checkpoint directory, whatever plan and number of devices wrote it.

        Raises:
            ValueError: the directory is not complete.
            RuntimeError: it belongs to another model.
        """
        module, ownership = self._pipeline.module, self._pipeline.ownership
        kept = {id(p) for p in self._pipeline.parameters_with_state()} if optimizers else set()
        names = {id(p): name for name, p in module.named_parameters() if id(p) in kept}
        ordered = [[names.get(id(p), "") for p in _parameters(optimizer)] for optimizer in optimizers]
        held = sorted(state.held_keys(module, ownership))
        checkpoint, present = sharded_checkpoint.load(path, held, ordered, self._group, weights_only)
        if module.strict_loading:
            state.check_keys(module, present)
        return checkpoint

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool) -> None:
        """Load the own part of the module's state dict, given whole or as `load` returned it."""
        pipeline = self._pipeline
        held = state.held_keys(pipeline.module, pipeline.ownership)
        complete = set(state_dict) != held  # of a directory only the own part was read, and its keys were checked
        state.load_own_state(pipeline.module, pipeline.ownership, state_dict, strict=strict and complete)

    def load_optimizer_state(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Load the own part of an optimizer's state dict, given whole or as `load` returned it."""
        plain = _plain(optimizer)
        plain.load_state_dict(state.own_optimizer_state(plain, self._pipeline.parameters_with_state(), state_dict))

    def _gather(self, value: Any) -> list[Any] | None:
        """The values of all processes that write on the first, None elsewhere."""
        if self._everyone is None:
            return self._pipeline.gather(value)
        is_first = self._pipeline.replicas.rank == 0
        parts: list[Any] | None = [None] * self._everyone.size() if is_first else None
        dist.gather_object(value, parts, dst=0, group=self._everyone)
        return parts

    @property
    def _group(self) -> dist.ProcessGroup | None:
        channels = self._pipeline.channels
        return None if channels is None else channels.control


def _plain(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in _plain(optimizer).param_groups for p in group["params"]]
