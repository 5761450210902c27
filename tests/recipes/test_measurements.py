"""Steps are counted once each, with all their tokens, without validation."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zb import ZeroBubbleCallback
from lightning_zb.planning.planner import make_plan
from recipes.measurements import Measurements, _forget_peak_memory, _peak_memory
from recipes.models.sequential import SequentialLanguageModel
from tests.lightning.known_costs import EQUAL


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
    measurements._was_disturbed = [False] * 2
    assert measurements.step_time == 9.0
    measurements._step_times += [1.0, 2.0, 1.0]
    measurements._was_disturbed += [False] * 3
    assert measurements.step_time == 1.0
    assert measurements.tokens_per_second == pytest.approx(64.0)


def test_steps_of_an_earlier_plan_are_left_out(monkeypatch):
    """And those beside which plans are looked for, as far as there are others."""
    clock, watcher = Clock(), ZeroBubbleCallback()
    monkeypatch.setattr("recipes.measurements.time.perf_counter", clock)
    measurements = Measurements(num_warmup_steps=0)
    plans = [make_plan(EQUAL, 2, 8, name) for name in ("1f1b", "zb-h1")]
    pipeline = SimpleNamespace(last_step_seconds=1.0, last_step_was_recorded=False)
    strategy = SimpleNamespace(plan=plans[0], pipeline=pipeline)
    trainer = SimpleNamespace(strategy=strategy, callbacks=[measurements, watcher], global_step=0)
    module, batch = SimpleNamespace(log=lambda *_, **__: None), {"input_ids": torch.zeros(4)}
    found = []
    for plan, seconds, is_planning in ((0, 9.0, False), (1, 4.0, False), (1, 8.0, True), (1, 8.0, True), (1, 5.0, False)):
        strategy.plan = replace(plans[plan], costs=replace(EQUAL))  # other costs alone are no other plan
        watcher._deliberation = object() if is_planning else None
        measurements.on_train_batch_start(trainer, module, batch, 0)
        clock.now += seconds
        trainer.global_step += 1
        measurements.on_train_batch_end(trainer, module, None, batch, 0)
        found.append(measurements.step_time)
    assert found == [9.0, 4.0, 4.0, 4.0, 4.5]


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
    measurements._was_disturbed = [False, True, False, False, False]
    assert measurements.step_time == 2.25
    measurements._was_disturbed = [True] * 5
    assert measurements.step_time == 2.5
