"""What callbacks rely on, on every rank: final weights at flush points, and the metrics they monitor.

Only the rank of the last chunk sees the loss, and it is global rank 0. ModelCheckpoint, EarlyStopping and
ReduceLROnPlateau decide on every rank, so they all need its numbers: at the end of evaluation, at the end of a
training epoch before and after the user's hook, and on steps where a checkpoint is due.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torchmetrics import Metric


class LossRankMetrics(Callback):
    """Flushes pending steps and broadcasts `trainer.callback_metrics` of the loss rank; first in the list of callbacks."""

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.strategy.abandon_step()

    def on_validation_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            share_metrics(trainer)

    def on_test_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        share_metrics(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        every = [getattr(c, "_every_n_train_steps", 0) for c in trainer.checkpoint_callbacks]
        if any(n and trainer.global_step % n == 0 for n in every):
            share_metrics(trainer)


def share_metrics(trainer: Any) -> None:
    """Give every rank the callback metrics of global rank 0, which has the loss (a collective)."""
    mine = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()} if trainer.is_global_zero else None
    shared = trainer.strategy.broadcast(mine)
    if not trainer.is_global_zero:
        trainer._logger_connector._callback_metrics.update(shared)


def join_replicas(module: pl.LightningModule, group: dist.ProcessGroup | None) -> None:
    """Let the module's torchmetrics compute from what the loss ranks of all replicas saw.

    Only one process of a pipeline updates them; a gathering over all processes would wait for those that never come.

    Args:
        module: the user's LightningModule.
        group: the loss ranks of all replicas, on such a rank; None for one replica and elsewhere.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.process_group = group
            if group is None:
                metric.distributed_available_fn = _nobody_else


def _nobody_else() -> bool:
    return False
