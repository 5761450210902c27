"""Steps are counted once each, with all their tokens, without validation."""

from __future__ import annotations

import sys

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.measurements import Measurements, _forget_peak_memory, _peak_memory
from recipes.models.sequential import SequentialLanguageModel


class Clock:
    """A clock that training moves by 1 for each microbatch and validation by 100."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Model(SequentialLanguageModel):
    def __init__(self, clock: Clock) -> None:
        super().__init__(width=8, num_blocks=1, num_heads=1, max_length=16)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 100
        super().validation_step(batch, batch_idx)


def test_steps_are_timed_without_validation(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("recipes.measurements.time.perf_counter", clock)
    ids = torch.zeros(16, dtype=torch.long)
    loader = DataLoader([{"input_ids": ids, "labels": ids}] * 40, batch_size=2)
    measurements = Measurements(num_warmup_steps=1)
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        val_check_interval=8,
        accelerator="cpu",
        callbacks=[measurements],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(clock), loader, loader)
    assert measurements.step_time == 4
    assert measurements.tokens_per_second == 4 * 2 * 16 / 4
    assert float(trainer.callback_metrics["tokens_per_second"]) == 32
    assert len(measurements.peak_memory) == 1
    assert measurements.peak_memory[0] > 2**26


def test_first_steps_are_left_out_when_there_are_more():
    measurements = Measurements(num_warmup_steps=2)
    measurements._step_times = [9.0, 9.0]
    measurements._step_tokens = [64, 64]
    measurements._was_recorded = [False] * 2
    assert measurements.step_time == 9.0
    measurements._step_times += [1.0, 2.0, 1.0]
    measurements._was_recorded += [False] * 3
    assert measurements.step_time == 1.0
    assert measurements.tokens_per_second == pytest.approx(64.0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot forget a peak")
def test_peak_memory_is_that_of_training(tmp_path):
    cpu, size = torch.device("cpu"), 2**28
    torch.ones(size, dtype=torch.uint8)
    before = _peak_memory(cpu)
    _forget_peak_memory(cpu)
    assert _peak_memory(cpu) < before - size // 2
    torch.ones(size, dtype=torch.uint8)
    assert _peak_memory(cpu) > before - size // 2


def test_steps_that_the_profiler_measured_are_left_out_as_far_as_there_are_others():
    measurements = Measurements(num_warmup_steps=1)
    measurements._step_times = [9.0, 5.0, 2.0, 2.5, 2.25]
    measurements._was_recorded = [False, True, False, False, False]
    assert measurements.step_time == 2.25
    measurements._was_recorded = [True] * 5
    assert measurements.step_time == 2.5
