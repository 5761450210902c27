"""What callbacks rely on, on every rank: final weights at flush points, and the metrics they monitor.

Only the rank of the last chunk sees the loss, and it is global rank 0. ModelCheckpoint, EarlyStopping and
ReduceLROnPlateau decide on every rank, so they all need its numbers: at the end of validation, at the end of a
training epoch after the user's hook and before the monitoring callbacks, and on steps where a checkpoint is due.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

LOSS_RANK = 0


class LossRankMetrics(Callback):
    """Flushes pending steps and broadcasts `trainer.callback_metrics` of the loss rank; first in the list of callbacks."""

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.strategy.flush()

    def on_validation_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            share_metrics(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        every = [getattr(c, "_every_n_train_steps", 0) for c in trainer.checkpoint_callbacks]
        if any(n and trainer.global_step % n == 0 for n in every):
            share_metrics(trainer)


def share_metrics(trainer: Any) -> None:
    """Give every rank the callback metrics of the loss rank (a collective)."""
    mine = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()} if trainer.global_rank == LOSS_RANK else None
    shared = trainer.strategy.broadcast(mine, src=LOSS_RANK)
    if trainer.global_rank != LOSS_RANK:
        trainer._logger_connector._callback_metrics.update(shared)


def share_after_epoch_end(module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Wrap the module's `on_train_epoch_end` on the instance: the monitoring callbacks come right after it.

    A callback could not stand there: a Checkpoint subclass would, but it would become `trainer.checkpoint_callback`.
    """
    users_hook = module.on_train_epoch_end
    if getattr(users_hook, "_shares_metrics", False):
        return

    def on_train_epoch_end() -> None:
        users_hook()
        share_metrics(trainer)

    on_train_epoch_end._shares_metrics = True  # type: ignore[attr-defined]
    module.on_train_epoch_end = on_train_epoch_end  # type: ignore[method-assign]
