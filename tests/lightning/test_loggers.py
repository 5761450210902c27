"""What loggers other than the CSV one write: the plain Trainer's values, once."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_zb import ZeroBubbleCallback, ZeroBubbleStrategy
from tests.lightning.models import TokenModule, Tokens


def _logged(directory: Path, strategy, *callbacks: L.Callback) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    L.seed_everything(5, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=4, accumulate_grad_batches=4,
        log_every_n_steps=1, callbacks=list(callbacks),
        logger=TensorBoardLogger(directory, name="", version="log"), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    load = torch.utils.data.DataLoader
    trainer.fit(TokenModule(), load(Tokens(16), batch_size=2, shuffle=True), load(Tokens(4), batch_size=2))
    events = EventAccumulator(str(directory / "log"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    plain = _logged(tmp_path / "plain", "auto")
    measuring = ZeroBubbleCallback(profile_steps=(1, 3), replan="off", report=False)
    split = _logged(tmp_path / "split", ZeroBubbleStrategy(virtual_devices=2), measuring)
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= plain.keys()
    assert {tag: values for tag, values in split.items() if not tag.startswith("zb/")} == plain
    assert "zb/bubble_rate" in split
