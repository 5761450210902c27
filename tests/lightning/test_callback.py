"""Profile, plan, switch: what happens once the callback has decided, and what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import lightning_zb
from lightning_zb.callback_state import from_plain, why_not
from lightning_zb.plan_choice import Replan
from lightning_zb.planning.budget import transient_bytes
from lightning_zb.planning.planfile import read_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.replanning import Decision
from tests.lightning.known_costs import EQUAL
from tests.lightning.models import MODELS, dataset
from tests.lightning.processes import run_ranks

ROOT = Path(__file__).parents[2]


def test_a_plan_that_turns_out_slower_is_given_up():
    """After the steps that verify it, in processes of their own; devices of one process take turns and prove nothing."""
    before, new = make_plan(EQUAL, 2, 8, "zb", 2.0), make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    for took, channels, expected in ((1.2, "some", before), (1.04, "some", new), (1.2, None, new)):
        pipeline = SimpleNamespace(plan=new, channels=channels)
        pipeline.switch = lambda plan, pipeline=pipeline: setattr(pipeline, "plan", plan)
        trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: value), global_step=9, loggers=[])
        trainer.optimizers, pipeline.device = [], torch.device("cpu")
        callback = lightning_zb.ZeroBubbleCallback()
        profiles = [SimpleNamespace(step_seconds=seconds) for seconds in (1.0, took)]
        callback._replaced, callback.profile = (before, profiles[0]), profiles[1]
        assert callback._has_gone_back(trainer, pipeline) is (expected is before)
        assert pipeline.plan is expected
        assert callback.profile is profiles[expected is new]
        assert (callback._window is not None) is (expected is before)  # to see what it takes now
        callback.profile = SimpleNamespace(step_seconds=9.0)  # whatever slows the machine down later
        assert not callback._has_gone_back(trainer, pipeline)
        if expected is before:
            (decision,) = callback.decisions
            assert (decision.change, decision.step) == ("placement", 9)
            assert decision.reason == "zb again: a step took 1 s with it, 1.2 s with zb-v"


def test_the_plan_that_ran_is_named_where_training_ended_first(monkeypatch):
    """It is not the strategy's first plan where an earlier fit switched."""
    said: list[str] = []
    monkeypatch.setattr("lightning_zb.callback.rank_zero_info", said.append)
    callback = lightning_zb.ZeroBubbleCallback(report=False)
    callback._deliberation = SimpleNamespace(close=lambda: None)
    pipeline = SimpleNamespace(plan=make_plan(EQUAL, 2, 8, "zb", 2.0))
    callback.on_train_end(SimpleNamespace(strategy=SimpleNamespace(pipeline=pipeline)), None)
    assert said == ["zero_bubble: training ended before a plan with measured costs could run; zb ran throughout"]


def test_wrong_options_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="must hold two steps"):
        lightning_zb.ZeroBubbleCallback(profile_steps=(3, 4))
    with pytest.raises(ValueError, match="'off', 'order'"):
        lightning_zb.ZeroBubbleCallback(replan="everything")
    with pytest.raises(TypeError, match="zero_bubble"):
        _fit(lightning_zb.ZeroBubbleCallback(), None, Path("."), 1)
    strategy = lightning_zb.ZeroBubbleStrategy(memory_budget="1GiB", virtual_devices=2)
    with pytest.raises(ValueError, match="needs measured bytes"):
        _fit(lightning_zb.ZeroBubbleCallback(profile_steps=None), strategy, Path("."), 1)


def _fit(
    callback: L.Callback,
    strategy,
    directory: Path,
    steps: int,
    module: L.LightningModule | None = None,
    data=None,
    resume: str | None = None,
):
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy or "auto", accumulate_grad_batches=8, max_steps=steps,
        callbacks=[callback], logger=L.pytorch.loggers.CSVLogger(directory, name="", version="run"), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = data or torch.utils.data.DataLoader(dataset("tokens", 8 * 2 * steps), batch_size=2)
    trainer.fit(module or MODELS["tokens"](), data, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("budget", ["8MiB", ["8MiB", "9MiB"], [1.0, 1.5]])
def test_budgets_in_bytes_count_once_layers_are_measured(budget, tmp_path: Path):
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 4), background=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="device . held")  # not even before bytes are known
        trainer = _fit(callback, lightning_zb.ZeroBubbleStrategy(memory_budget=budget, virtual_devices=2), tmp_path, 12)
    plan, profile = trainer.strategy.plan, callback.profile
    assert plan.memory_limit is not None
    transient = transient_bytes(plan.costs, plan.partition, plan.placement)
    assert min(transient) > 0
    for device, entry in enumerate(budget if isinstance(budget, list) else [budget] * 2):
        if isinstance(entry, str):
            chunks = [[plan.costs.layers[i] for i in plan.partition.chunks[c]] for c in plan.placement.chunks_of(device)]
            states = sum(layer.state_bytes for chunk in chunks for layer in chunk)
            gradients = max(sum(layer.parameter_bytes for layer in chunk) for chunk in chunks)  # of one W
            assert plan.memory_limit[device] == pytest.approx(int(entry[0]) * 2**20 - states - gradients - transient[device])
        else:
            assert plan.memory_limit[device] == pytest.approx(entry * plan.costs.activation_bytes - transient[device])
        assert profile.peak_bytes[device] == pytest.approx(plan.predicted.peak_bytes[device], rel=0.1)
    logged = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"zb/bubble_rate", "zb/step_time_predicted", "zb/step_time_measured", "zb/rollbacks", "zb/peak_memory"} <= set(
        logged
    )


def test_too_much_memory_is_reported_at_once(tmp_path: Path):
    """A budget that the cautious first order exceeds: it goes on where nothing may change, and the user hears of it."""
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 3), replan="off")
    strategy = lightning_zb.ZeroBubbleStrategy(schedule="zb-v", memory_budget="0.6MiB", virtual_devices=2)
    with pytest.warns(UserWarning, match=r"device 0 held .* of activations, more than .* that its memory budget leaves"):
        _fit(callback, strategy, tmp_path, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_budget_that_nothing_fits_ends_training_once_bytes_are_known(schedule: str, tmp_path: Path):
    """The sentence says which one is enough."""

    def fit(budget: str) -> None:
        callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 3), background=False)
        strategy = lightning_zb.ZeroBubbleStrategy(schedule=schedule, memory_budget=budget, virtual_devices=2)
        _fit(callback, strategy, tmp_path, 6)

    sentence = r"with the bytes that were measured, .* does not fit memory_budget='0\.3MiB'; the smallest that fits is '(.*)'$"
    with pytest.raises(RuntimeError, match=sentence) as caught:
        fit("0.3MiB")
    match = re.search(sentence, str(caught.value))
    assert match is not None
    fit(match[1])


def test_a_run_that_ends_before_its_new_plan_is_verified_writes_what_it_measured(tmp_path: Path, monkeypatch):
    new = lambda running, costs, *_: Decision(make_plan(costs, 2, 8, "zb-h1"), "placement", "told to")  # noqa: E731
    monkeypatch.setattr("lightning_zb.callback.decide", new)
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 3), background=False)
    trainer = _fit(callback, lightning_zb.ZeroBubbleStrategy(schedule="zb-v", virtual_devices=2), tmp_path, 4)
    assert trainer.strategy.plan.planner.name == "zb-h1"
    written = tmp_path / "run" / "zero_bubble"
    assert read_plan(written / "plan.json").planner.name == "zb-v"  # which was measured
    summary = (written / "summary.md").read_text()
    assert "told to" in summary
    assert "## Optimizer steps" in summary


@pytest.mark.slow
@pytest.mark.distributed
def test_the_recipe_keeps_every_budget_and_waits_less_with_more(tmp_path: Path):
    """python recipes/train.py: measured peaks within 10 % of the predicted ones and never above the budget."""
    pytest.importorskip("transformers")
    budgets = (0.6, 1.0, 1.5, 2.0)
    measured = None
    for budget in budgets:
        folder = tmp_path / str(budget)
        options = ["compare=null", "threads=1", "trainer.max_steps=40", f"strategy.memory_budget={budget}"]
        command = ["timeout", "-k", "1", "200", sys.executable, "recipes/train.py", f"hydra.run.dir={folder}", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        job = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.returncode == 0, job.stdout
        assert "of activations, more than" not in job.stdout
        plan = read_plan(folder / "metrics" / "zero_bubble" / "plan.json")
        peaks = json.loads((folder / "metrics" / "zero_bubble" / "measured.json").read_text())["peak_bytes"]
        print(budget, [peak / plan.costs.activation_bytes for peak in peaks], plan.predicted)
        assert peaks == pytest.approx(plan.predicted.peak_bytes, rel=0.1)
        assert max(peaks) <= budget * plan.costs.activation_bytes
        measured = measured or plan.costs
    for schedule, tolerance in (("zb-v", 0.0), ("auto", 0.001)):
        predicted = [make_plan(measured, 2, 8, schedule, budget).predicted for budget in budgets]
        bubbles = [p.bubble_rate for p in predicted]
        print(schedule, bubbles)
        assert all(more.step_time <= (1 + tolerance) * less.step_time for less, more in pairwise(predicted)), bubbles
        assert bubbles[-1] < 0.75 * bubbles[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_predictions_come_true_and_drift_is_noticed(tmp_path: Path):
    """Two processes, layers of known times: a partition by measured costs, then a slower layer and another partition."""
    codes, outputs = run_ranks("tests.lightning.callback_worker", [str(tmp_path)], 2, tmp_path, 180)
    assert codes == [0, 0], outputs
    result = json.loads((tmp_path / "result0.json").read_text())
    changes = [change for _, change, _ in result["decisions"]]
    assert [change for change in changes if change not in ("costs", "nothing")] == ["partition", "partition"]
    assert json.loads((tmp_path / "result1.json").read_text())["decisions"] == result["decisions"]
    assert result["drifts"] == 1
    first, verified, slower, adapted = result["verified"]
    assert verified["measured"] == pytest.approx(verified["predicted"], rel=0.05)
    assert adapted["measured"] == pytest.approx(adapted["predicted"], rel=0.05)
    assert verified["measured"] < 0.85 * first["measured"]
    assert adapted["measured"] < 0.9 * slower["measured"]


@pytest.mark.parametrize("replan", ["order", "partition"])
def test_a_resumed_run_starts_with_the_measured_plan(replan: str, tmp_path: Path):
    """Six steps, a checkpoint, six more: weights, plan, costs and decisions of a run that was never interrupted."""
    options = {"profile_steps": (1, 4), "replan": replan, "background": False}
    first, path = lightning_zb.ZeroBubbleCallback(**options), str(tmp_path / "six.ckpt")
    data = torch.utils.data.DataLoader(dataset("tokens", 16 * 12), batch_size=2)
    strategy = {"schedule": "zb", "memory_budget": 1.5, "virtual_devices": 2, "partition": [2, 6]}
    trainer = _fit(first, lightning_zb.ZeroBubbleStrategy(**strategy), tmp_path / "a", 6, MODELS["tokens"](), data)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)  # plain values only
    assert saved["callbacks"]["ZeroBubbleCallback"]["decisions"][0]["step"] == first.decisions[0].step == 5
    if replan == "partition":
        assert first.decisions[0].change == "partition"

    second = lightning_zb.ZeroBubbleCallback(**options)
    resumed = _fit(
        second, lightning_zb.ZeroBubbleStrategy(**strategy), tmp_path / "b", 12, MODELS["tokens"](), data, resume=path
    )
    assert resumed.strategy.plan == trainer.strategy.plan
    assert second.decisions == first.decisions
    assert second.profile.costs == trainer.strategy.plan.costs
    assert second.profile.peak_bytes == first.profile.peak_bytes
    plain = _fit(L.Callback(), None, tmp_path / "c", 12, MODELS["tokens"](), data, resume=path)
    for (name, ours), theirs in zip(
        resumed.lightning_module.named_parameters(), plain.lightning_module.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_plan_for_something_else_is_not_taken_over(tmp_path: Path):
    """Another budget or number of microbatches: the run says so and measures again."""
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 3), background=False)
    trainer = _fit(callback, lightning_zb.ZeroBubbleStrategy(memory_budget=1.5, virtual_devices=2), tmp_path, 5)
    state = from_plain(callback.state_dict())
    request = trainer.strategy.plan_request
    assert why_not(state.plan, state, request) is None
    older = callback.state_dict()
    older["plan"] = {**older["plan"], "format": "lightning-zb-plan/0"}
    with pytest.warns(UserWarning, match="plan cannot be read .*measured again"):
        lightning_zb.ZeroBubbleCallback().load_state_dict(older)
    assert "1.5" in (why_not(state.plan, state, replace(request, memory_budget=2.0)) or "")
    other = make_plan(state.plan.costs, 2, 4, "zb-v")
    assert "8 microbatches, this run has 2 and 4" in (why_not(other, state, request) or "")
    other = make_plan(EQUAL, 2, 8, "zb-v")
    assert why_not(other, state, request) == "is for other layers"


def test_what_a_new_plan_may_change_follows_from_what_was_asked_for():
    for options, expected in (
        ({}, Replan.PLACEMENT),
        ({"partition": "even"}, Replan.ORDER),
        ({"schedule": "zb-v"}, Replan.ORDER),
    ):
        callback = lightning_zb.ZeroBubbleCallback()
        trainer = SimpleNamespace(strategy=lightning_zb.ZeroBubbleStrategy(**options))
        callback.setup(trainer, None, "fit")
        assert callback.replan is expected
    assert lightning_zb.ZeroBubbleCallback(profile_steps=None, replan="placement").replan is Replan.OFF
