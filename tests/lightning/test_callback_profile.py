"""The profiler finds the times that emulated layers really take, and changes no bit."""

from __future__ import annotations

import time
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_zb
from lightning_zb.execution.pass_samples import usual
from lightning_zb.planning.costs import LayerCost, LayerRole
from lightning_zb.planning.planfile import read_costs
from tests.lightning.emulated import SleepingLayer, SleepingModule
from tests.lightning.fitting import Case, differences, run
from tests.lightning.models import KernelModule, Vectors

MILLISECONDS = [(60.0, 90.0, 75.0), (120.0, 60.0, 60.0), (75.0, 75.0, 135.0), (75.0, 135.0, 60.0)]


def fit(module: L.LightningModule, callback: L.Callback, directory: Path, steps: int, accumulate: int = 4, **strategy):
    options = {"schedule": "zb-v", "virtual_devices": 2, **strategy}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=lightning_zb.ZeroBubbleStrategy(**options), accumulate_grad_batches=accumulate,
        max_steps=steps, callbacks=[callback], logger=L.pytorch.loggers.CSVLogger(directory, name="", version="run"),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Vectors(steps * accumulate), batch_size=1))
    return trainer


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_times_of_layers_are_found(schedule: str, tmp_path: Path):
    """F, B and W of every layer, whether the schedule splits the backward or not.

    What a layer took is noted by the layer itself: on a busy machine it sleeps longer than it was told to, and what disturbs
    a pass beside its layers counts as theirs, so one of three runs has to find them within 3 %.
    """
    for attempt in range(3):
        module, directory = SleepingModule(MILLISECONDS), tmp_path / str(attempt)
        callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 10), replan="off")  # eight steps take times, as by default
        fit(module, callback, directory, 10, accumulate=2, schedule=schedule)
        costs = read_costs(directory / "run" / "zero_bubble" / "costs.json")
        if all(map(_is_found, module.layers, costs.layers[1:-1])):
            break
    else:
        pytest.fail(f"{costs.layers}, but layers slept {[layer.slept for layer in module.layers]}")
    assert [c.role for c in costs.layers] == [LayerRole.PROLOGUE, *[LayerRole.LAYER] * 4, LayerRole.EPILOGUE]
    for cost in costs.layers[1:-1]:
        assert cost.parameter_bytes == 4 * (8 * 8 + 8 + 8)  # of the product, and of the layer itself
        assert cost.state_bytes == pytest.approx(4 * cost.parameter_bytes, abs=16)  # gradient, two moments, steps
        assert cost.output_bytes == cost.activation_bytes == 8 * 4
        assert cost.weight_stash_bytes == 2 * 8 * 4  # input and output gradient of the product


def _is_found(layer: SleepingLayer, cost: LayerCost) -> bool:
    """Whether the times found are those that the layer took in the steps that took times."""
    forward, backward, weight = (usual(layer.slept[part][-16:]) for part in "FBW")
    found = (cost.forward, cost.backward_input, cost.backward_weight, cost.backward)
    return found == pytest.approx((forward, backward, weight, backward + weight), rel=0.03)


class _SlowStart(SleepingModule):
    """Sleeps before its layers, as code does that every chunk runs again."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_what_every_chunk_runs_again_is_the_overhead_of_a_pass(tmp_path: Path):
    """It is part of no layer and not of the prologue; as each chunk adds it, a chunk more costs it once more."""
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 6), replan="off")
    trainer = fit(_SlowStart([(20.0, 20.0, 20.0)] * 4), callback, tmp_path, 6, accumulate=2)
    costs, partition = read_costs(tmp_path / "run" / "zero_bubble" / "costs.json"), trainer.strategy.plan.partition
    assert 0.02 < costs.overhead.forward < 0.03
    assert costs.overhead.backward_input < 0.01
    assert costs.layers[0].forward < 0.005
    assert max(layer.forward for layer in costs.layers) < 0.03
    assert partition.num_chunks == 4
    for chunk, cost in enumerate(costs.chunks(partition)):
        assert cost.forward == pytest.approx(callback.profile.pass_seconds[chunk, "F"], rel=0.01)
    assert "Besides its items each pass" in (tmp_path / "run" / "zero_bubble" / "summary.md").read_text()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_profiling_and_planning_change_no_bit(schedule: str, precision: str, tmp_path: Path):
    """Steps 4 to 12 of these sixteen are measured by default: hooks on outputs and on saved tensors, split backwards."""
    case = Case(
        "run", "hybrid", {}, {"precision": precision, "gradient_clip_val": 0.5},
        strategy={"schedule": schedule, "virtual_devices": 2}, size=48, batch_size=2, accumulate=3,
    )  # fmt: skip
    result, plain = run(case, tmp_path / "ours"), run(case.plain(), tmp_path / "plain")
    assert result["steps"] == 16
    assert differences([result], plain) == []
    assert (tmp_path / "ours" / "run" / "zero_bubble" / "plan.json").exists()


def test_the_summary_says_which_share_of_w_can_move(tmp_path: Path):
    fit(KernelModule(), lightning_zb.ZeroBubbleCallback(profile_steps=(1, 4), replan="off"), tmp_path, 5, accumulate=2)
    rows = (tmp_path / "run" / "zero_bubble" / "summary.md").read_text().splitlines()
    shares = {row.split()[2]: row.split("|")[-2].strip() for row in rows if row.startswith("| ")}
    assert shares["layers.0"] == shares["layers.2"] == f"{100 * 384 / 984:.1f} % (Kernel whole in B)"
    assert shares["layers.1"] == shares["epilogue"] == "100.0 %"
