"""The progress bar of runs that are limited by optimizer steps."""

from __future__ import annotations

from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the right length when max_steps and accumulate_grad_batches meet.

    The bar counts batches, and Lightning's own total takes each remaining optimizer step for one batch.
    """

    @property
    def total_train_batches(self) -> int | float:
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        num_remaining_steps = trainer.max_steps - trainer.global_step
        return min(trainer.num_training_batches, num_remaining_steps * trainer.accumulate_grad_batches)
