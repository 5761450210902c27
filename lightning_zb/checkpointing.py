"""Lightning's calls about checkpoints, translated."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.checkpoints import Checkpoints
from lightning_zb.communication import PipelineCommunication
from lightning_zb.pipeline import Pipeline
from lightning_zb.sharded_checkpoint import is_sharded


class CheckpointingStrategy(PipelineCommunication):
    """The part of the strategy that saves and loads what its pipeline holds."""

    _save_distributed_checkpoint = False

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The running pipeline."""

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.pipeline, self._save_distributed_checkpoint, self.everyone)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self.is_interrupted else self._checkpoints.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {} if self.is_interrupted else self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.is_interrupted:
            rank_zero_warn(
                f"{filepath} is not saved: training was interrupted, and other devices may hold parts of another step"
            )
        elif self._save_distributed_checkpoint:
            self._checkpoints.save(checkpoint, Path(self.broadcast(filepath)), self.optimizers)  # of the first replica
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if is_sharded(checkpoint_path):
            return self._checkpoints.load(Path(checkpoint_path), self.optimizers, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        self._checkpoints.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._checkpoints.load_optimizer_state(optimizer, state)
        _optimizers_to_device(self.optimizers, self.root_device)
