"""What Lightning saves and loads: one consolidated file, equal to the plain Trainer's, or a sharded directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
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
    """

    def __init__(self, pipeline: Pipeline, sharded: bool) -> None:
        self._pipeline, self._sharded = pipeline, sharded
        self._writes = pipeline.replicas.replica == 0  # the others hold the same

    def state_dict(self) -> dict[str, Any]:
        """The module's: the whole model's on the first rank and {} elsewhere, or the own part where sharded."""
        pipeline = self._pipeline
        pipeline.flush()
        if not self._writes:
            return {}
        if self._sharded:
            held = state.held_keys(pipeline.module, pipeline.ownership)
            return {key: value for key, value in pipeline.module.state_dict().items() if key in held}
        return state.consolidated_state_dict(pipeline.module, pipeline.ownership, pipeline.gather)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's: all states on the first rank and {} elsewhere, or the own part where sharded."""
        self._pipeline.flush()
        if not self._writes:
            return {}
        if self._sharded:
            return _plain(optimizer).state_dict()
        return state.consolidated_optimizer_state(_plain(optimizer), self._pipeline.gather)

    def save(self, checkpoint: dict[str, Any], path: Path, optimizers: Sequence[Any]) -> None:
        """Write a checkpoint directory."""
        if not self._writes:
            return
        module = self._pipeline.module
        names = {id(p): name for name, p in module.named_parameters()}
        ordered = [[names[id(p)] for p in _parameters(optimizer)] for optimizer in optimizers]
        keys = list(module.state_dict())
        sharded_checkpoint.save(checkpoint, path, keys, ordered, self._pipeline.gather, self._group)

    def load(self, path: Path, optimizers: Sequence[Any], weights_only: bool | None) -> dict[str, Any]:
        """Read the own part of a checkpoint directory, whatever plan and number of devices wrote it.

        Raises:
            ValueError: the directory is not complete.
            RuntimeError: it belongs to another model.
        """
        module, ownership = self._pipeline.module, self._pipeline.ownership
        own = {id(p) for p in ownership.own_parameters()}
        names = {id(p): name for name, p in module.named_parameters() if id(p) in own}
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
        plain.load_state_dict(state.own_optimizer_state(plain, self._pipeline.ownership, state_dict))

    @property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        channels = self._pipeline.channels
        return None if channels is None else channels.control


def _plain(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in _plain(optimizer).param_groups for p in group["params"]]
