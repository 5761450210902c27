"""A user's training script that fails. Arguments: what fails, the rank it fails on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

import lightning_zb
from tests.lightning.models import TokenModule, Tokens

WHAT, RANK, DIRECTORY = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
AT_STEP = 2  # after a checkpoint was written


class Failure(Exception):
    """The first cause."""


def fail(where: str, step: int | None = None) -> None:
    """Fail here, where that is what was asked for."""
    if where != WHAT or int(os.environ.get("LOCAL_RANK", "0")) != RANK or (step is not None and step != AT_STEP):
        return
    raise Failure(f"deliberate failure in {where} on rank {RANK}")


def suffer(step: int) -> None:
    """What happens to a process from outside."""
    if step != AT_STEP or int(os.environ.get("LOCAL_RANK", "0")) != RANK:
        return
    if WHAT in ("SIGKILL", "SIGTERM", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, WHAT))
    elif WHAT == "SIGINT":
        os.killpg(0, signal.SIGINT)  # as the terminal does
    elif WHAT == "memory":
        raise torch.OutOfMemoryError(f"deliberate failure in memory on rank {RANK}")


class Optimizer(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        fail("optimizer")


class Growing(torch.nn.Module):
    """From some step on its output has another shape, on one rank only."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)[:, : 6 if self.calls > 10 else None]


class Module(TokenModule):
    def __init__(self) -> None:
        super().__init__()
        if WHAT == "shape":
            self.net.layers[3] = Growing(self.net.layers[3])

    def configure_optimizers(self):
        fail("configure_optimizers")
        return Optimizer(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        fail("on_train_start")

    def training_step(self, batch, batch_idx):
        suffer(self.global_step)
        fail("training_step", self.global_step)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, *_) -> None:
        fail("on_train_batch_start", self.global_step)

    def on_after_backward(self) -> None:
        fail("on_after_backward", self.global_step)

    def on_before_optimizer_step(self, optimizer) -> None:
        fail("on_before_optimizer_step", self.global_step)

    def on_train_batch_end(self, *_) -> None:
        fail("on_train_batch_end", self.global_step)

    def on_train_epoch_end(self) -> None:
        fail("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint) -> None:
        fail("on_save_checkpoint", self.global_step)

    def validation_step(self, batch, batch_idx):
        fail("validation_step", self.global_step)
        return super().validation_step(batch, batch_idx)


class FailingCallback(Callback):
    """Fails in the hook that was named with `callback.` before it."""

    def setup(self, *_, **__) -> None:
        fail("callback.setup")

    def on_train_batch_start(self, trainer, *_) -> None:
        fail("callback.on_train_batch_start", trainer.global_step)

    def on_before_zero_grad(self, trainer, *_) -> None:
        fail("callback.on_before_zero_grad", trainer.global_step)

    def on_train_batch_end(self, trainer, *_) -> None:
        fail("callback.on_train_batch_end", trainer.global_step)

    def on_validation_end(self, trainer, *_) -> None:
        fail("callback.on_validation_end", trainer.global_step)


def collate(items):
    if torch.utils.data.get_worker_info() is not None:
        fail("collate")
    return torch.utils.data.default_collate(items)


def main() -> None:
    L.seed_everything(3, verbose=False)
    size = 64 if WHAT != "loader" or int(os.environ.get("LOCAL_RANK", "0")) != RANK else 36
    workers = 1 if WHAT == "collate" else 0
    train = torch.utils.data.DataLoader(Tokens(size), batch_size=2, collate_fn=collate, num_workers=workers)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=0.5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=8,
        callbacks=[
            FailingCallback(),
            ModelCheckpoint(DIRECTORY, "{step}", every_n_train_steps=1, save_top_k=-1),
            OnExceptionCheckpoint(DIRECTORY),
        ],
        strategy=lightning_zb.ZeroBubbleStrategy(timeout=8),
    )  # fmt: skip
    trainer.fit(Module(), train, torch.utils.data.DataLoader(Tokens(4), batch_size=2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    time.sleep(0.1)
