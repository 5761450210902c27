"""The recipes' models: their loss, their optimizer, and that they learn under the plain Trainer."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.nn import functional as F

from recipes.data import ByteDataModule, read_folder
from recipes.models.sequential import SequentialLanguageModel

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def model() -> SequentialLanguageModel:
    torch.manual_seed(0)
    return SequentialLanguageModel(width=32, num_blocks=2, num_heads=2, max_length=64, learning_rate=1e-2, num_warmup_steps=4)


def test_loss_is_the_cross_entropy_of_the_next_byte(model):
    ids = torch.randint(256, (2, 9))
    logits = model.model(ids)
    expected = [-F.log_softmax(logits[row, place], -1)[ids[row, place + 1]] for row in range(2) for place in range(8)]
    torch.testing.assert_close(model.loss({"input_ids": ids, "labels": ids}), torch.stack(expected).mean())


def test_no_position_sees_the_future(model):
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 10:] += 1
    before, after = model.model(ids), model.model(changed % 256)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_no_position_of_the_hybrid_sees_the_future():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["model=hybrid"])
    torch.manual_seed(0)
    hybrid = instantiate(config.model).model
    ids = torch.randint(256, (1, 80))
    changed = ids.clone()
    changed[0, 50] = (ids[0, 50] + 1) % 256
    with torch.no_grad():
        before, after = hybrid(ids).logits, hybrid(changed).logits
    torch.testing.assert_close(before[:, :50], after[:, :50])
    assert (before[:, 50:] != after[:, 50:]).any(-1).all()  # and every later one sees the past


def test_only_matrices_decay_and_no_parameter_is_forgotten(model):
    model.trainer = L.Trainer(logger=False, barebones=True)
    decayed, rest = model.configure_optimizers()["optimizer"].param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    assert rest["weight_decay"] == 0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_learning_rate_rises_linearly_and_falls_as_a_cosine(model, topics_folder):
    rates = []

    class Record(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    data = ByteDataModule(partial(read_folder, str(topics_folder)), sequence_length=32, num_validation_windows=4)
    trainer = L.Trainer(
        max_steps=12,
        callbacks=[Record()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates == pytest.approx([1e-2 * factor for factor in [0.25, 0.5, 0.75, 1.0, *falling]])


def test_loss_falls_below_that_of_single_bytes(model, topics_folder):
    data = ByteDataModule(partial(read_folder, str(topics_folder)), sequence_length=64, batch_size=16)
    trainer = L.Trainer(
        max_steps=120,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=None,
        val_check_interval=120,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, data)
    metrics = trainer.callback_metrics
    counts = torch.bincount(torch.frombuffer(bytearray(read_folder(str(topics_folder)).train), dtype=torch.uint8))
    frequencies = counts[counts > 0] / counts.sum()
    assert metrics["val_loss"] < -(frequencies * frequencies.log()).sum()
    assert metrics["val_bits_per_byte"] == pytest.approx(float(metrics["val_loss"]) / math.log(2))
