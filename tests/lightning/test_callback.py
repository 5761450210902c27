"""Profile, plan, switch: what the callback decides, what then happens, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
from lightning_zb.device_memory import excess, free_bytes, settled_budget
from lightning_zb.drift import find_drift
from lightning_zb.model.layer_costs import ItemProfile, at_unit_speed, cost_model, item_sizes
from lightning_zb.model.layers import find_layers
from lightning_zb.plan_choice import PlanRequest, choose_plan
from lightning_zb.planning.budget import transient_bytes
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planfile import read_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.profile_window import Profile
from lightning_zb.replanning import Decision, Replan, decide, step_seconds
from tests.lightning.models import MODELS, dataset
from tests.lightning.processes import run_ranks

ROOT = Path(__file__).parents[2]


def costs(*seconds: float) -> CostModel:
    return CostModel(tuple(LayerCost(f"layers.{i}", s, s, s, 1.0, 0.5) for i, s in enumerate(seconds)))


EQUAL = costs(*[1.0] * 8)
UNEQUAL = costs(1, 1, 1, 1, 4, 4, 4, 4)


@pytest.mark.parametrize(
    ("replan", "change"), [("off", "nothing"), ("order", "nothing"), ("partition", "partition"), ("placement", "placement")]
)
def test_only_what_may_change_changes(replan: str, change: str):
    running = make_plan(EQUAL, 2, 8, "zb", 2.0)
    decision = decide(running, UNEQUAL, Replan(replan), "zb", 2.0)
    assert decision.change == change
    assert decision.plan.costs is UNEQUAL
    before = decide(running, UNEQUAL, Replan.OFF, "zb", 2.0).plan
    assert decision.plan.predicted.makespan <= before.predicted.makespan
    if change == "nothing":
        assert (decision.plan.schedule, decision.plan.partition) == (running.schedule, running.partition)


def test_a_fixed_order_is_left_alone():
    running = make_plan(EQUAL, 2, 8, "1f1b")
    assert decide(running, UNEQUAL, Replan.ORDER, "1f1b").change == "nothing"


def test_a_plan_over_the_limit_gives_way_even_to_a_slower_one():
    running = make_plan(EQUAL, 2, 8, "zb", 2.0)
    decision = decide(running, EQUAL, Replan.ORDER, "zb", 1.0)
    assert decision.change == "order"
    assert "exceeds the memory limit" in decision.reason
    assert max(decision.plan.predicted.peak_bytes) <= EQUAL.activation_bytes < max(running.predicted.peak_bytes)


def test_a_budget_that_nothing_fits_is_said_and_training_goes_on():
    running = make_plan(EQUAL, 2, 8, "zb", 1.0)
    decision = decide(running, EQUAL, Replan.ORDER, "zb", 0.1)
    assert decision.change == "nothing"
    assert "smallest that fits" in decision.reason


def test_ends_that_share_a_parameter_stay_on_one_device():
    running = make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    decision = decide(running, UNEQUAL, Replan.PLACEMENT, "zb-v", 2.0, joins_ends=True)
    assert decision.plan.placement.devices[0] == decision.plan.placement.devices[-1]


def test_a_plan_that_turns_out_slower_is_given_up():
    """After the steps that verify it, in processes of their own; devices of one process take turns and prove nothing."""
    before, new = make_plan(EQUAL, 2, 8, "zb", 2.0), make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    for took, channels, expected in ((1.2, "some", before), (1.04, "some", new), (1.2, None, new)):
        pipeline = SimpleNamespace(plan=new, channels=channels)
        pipeline.switch = lambda plan, pipeline=pipeline: setattr(pipeline, "plan", plan)
        trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: value), global_step=9, loggers=[])
        callback = lightning_zb.ZeroBubbleCallback()
        profiles = [SimpleNamespace(timeline=SimpleNamespace(makespan=seconds)) for seconds in (1.0, took)]
        callback._replaced, callback.profile = (before, profiles[0]), profiles[1]
        assert callback._has_gone_back(trainer, pipeline) is (expected is before)
        assert pipeline.plan is expected
        assert callback.profile is profiles[expected is new]
        if expected is before:
            (decision,) = callback.decisions
            assert (decision.change, decision.step) == ("placement", 9)
            assert decision.reason == "zb again: a step took 1 s with it, 1.2 s with zb-v"


def test_a_new_plan_keeps_to_the_constraints():
    running = make_plan(EQUAL, 2, 8, "auto", 2.0, constraints={"together": [["layers.4", "layers.5"]]}, effort=1)
    for replan in (Replan.PARTITION, Replan.PLACEMENT):
        cut = [chunk[0] for chunk in decide(running, UNEQUAL, replan, "auto", 2.0).plan.partition.chunks]
        constraints = {"together": [[f"layers.{i - 1}", f"layers.{i}"] for i in cut[1:]]}
        decision = decide(running, UNEQUAL, replan, "auto", 2.0, constraints=constraints)
        assert not set(cut[1:]) & {chunk[0] for chunk in decision.plan.partition.chunks}


def test_drift_is_a_chunk_that_left_its_plan():
    plan = make_plan(EQUAL, 2, 8, "zb")
    seconds = {(c, part): 4.0 for c in (0, 1) for part in "FBW"}
    assert find_drift(plan, seconds, 0.1) is None
    assert find_drift(plan, seconds | {(1, "B"): 5.0}, 0.1) is None  # 13 instead of 12: 8 %
    assert "chunk 1 takes 14000.0 ms" in (find_drift(plan, seconds | {(1, "B"): 6.0}, 0.1) or "")


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
        trainer = _fit(callback, lightning_zb.ZeroBubbleStrategy(memory_budget=budget, virtual_devices=2), tmp_path, 10)
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
    with pytest.warns(UserWarning, match=r"device 0 held .* of activations, more than the .* that its memory budget leaves"):
        _fit(callback, strategy, tmp_path, 3)


def test_a_run_that_ends_before_its_new_plan_is_verified_writes_what_it_measured(tmp_path: Path, monkeypatch):
    new = lambda running, costs, *_: Decision(make_plan(costs, 2, 8, "zb-h1"), "placement", "told to")  # noqa: E731
    monkeypatch.setattr(lightning_zb.callback, "decide", new)
    callback = lightning_zb.ZeroBubbleCallback(profile_steps=(1, 3), background=False)
    trainer = _fit(callback, lightning_zb.ZeroBubbleStrategy(schedule="zb-v", virtual_devices=2), tmp_path, 4)
    assert trainer.strategy.plan.planner.name == "zb-h1"
    written = tmp_path / "run" / "zero_bubble"
    assert read_plan(written / "plan.json").planner.name == "zb-v"  # which was measured
    assert "told to" in (written / "summary.md").read_text()


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
    command = [sys.executable, "-m", "tests.lightning.callback_worker", str(tmp_path)]
    codes, outputs = run_ranks(command, 2, tmp_path, 180)
    assert codes == [0, 0], outputs
    result = json.loads((tmp_path / "result0.json").read_text())
    assert [change for _, change, _ in result["decisions"]] == ["partition", "partition"]
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


def test_a_size_is_held_against_all_that_a_device_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30 + 1)

    def found(budget, device: str = "cuda") -> str | None:
        request = PlanRequest(schedule="zb-v", memory_budget=budget, partition="even", costs=None)
        return excess(SimpleNamespace(request=request, device=torch.device(device), devices=(1,)))

    assert "device 1 allocated 1.00 GiB in all, more than its memory_budget '1GiB'" in (found(["2GiB", "1GiB"]) or "")
    assert found("1GiB") is not None
    assert found("2GiB") is found(1.5) is found(None) is found([1.0, 1.0]) is found("1GiB", "cpu") is None


def test_what_is_held_beside_activations_counts():
    """Parameters, gradients, Adam's moments; a copy to roll back to; gradients of tied parameters that wait."""
    module = MODELS["tokens"]()
    stack = find_layers(module, None)
    optimizer = torch.optim.AdamW(module.parameters())
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    layer = list(stack.modules[0].parameters())
    size, steps = sum(p.numel() * 4 for p in layer), 4 * len(layer)
    own = dict.fromkeys(layer, 3)
    plain = item_sizes(stack, layer, {}, [optimizer])[1]
    assert plain == (size, 4 * size + steps)
    assert item_sizes(stack, layer, {}, [optimizer], copied=True)[1] == (size, 7 * size + 2 * steps)
    assert item_sizes(stack, layer, {}, [optimizer], parts=own)[1] == (size, 7 * size + steps)


def test_costs_are_those_of_a_device_of_speed_one():
    """A layer that took 4 s on a device of speed 0.5 is one of 2 s, and its chunk is planned with 4 s there again."""
    measured = [(0, 4.0, 0.5), (1, 2.0, 1.5)]
    items = [at_unit_speed(ItemProfile(i, LayerCost(str(i), s, s, s), (s, s, s), 1), speed) for i, s, speed in measured]
    model = cost_model(items, Link(), (0.5, 1.5))
    assert [layer.forward for layer in model.layers] == [2.0, 3.0]
    assert items[0].high == (2.0, 2.0, 2.0)
    plan = make_plan(model, 2, 4, "1f1b")
    assert plan.predicted.busy == pytest.approx((4 * 12.0, 4 * 6.0))
    assert find_drift(plan, {(c, part): s for c, s, _ in measured for part in "FBW"}, 0.01) is None


def test_what_a_device_has_left_becomes_the_budget(monkeypatch: pytest.MonkeyPatch):
    """CUDA: what is free or only reserved, less a tenth and the largest workspace; a CPU has no limit."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda")) == 900
    assert free_bytes(torch.device("cpu")) is None
    model = CostModel(tuple(replace(layer, workspace_bytes={"F": 100.0}) for layer in EQUAL.layers))
    plan = make_plan(model, 2, 8, "zb", 2.0)
    profile = Profile(model, (), None, {}, (), False)
    request = PlanRequest(schedule="zb-v", memory_budget=None, partition="even", costs=None)
    pipeline = SimpleNamespace(plan=plan, request=request, device=torch.device("cuda"), devices=(0, 1), channels=None)
    assert settled_budget(pipeline, profile) == [800 / model.activation_bytes] * 2
    pipeline.request = replace(request, memory_budget=1.5)
    assert settled_budget(pipeline, profile) == 1.5
    pipeline.request = replace(request, schedule="zb-2p")
    assert settled_budget(pipeline, profile) is None  # the schedule's name says its budget
    pipeline.request = replace(request, schedule="auto")
    assert settled_budget(pipeline, profile) == [2.0] * 2  # of 100
    pipeline.device = torch.device("cpu")
    assert settled_budget(pipeline, profile) == 2.0
    pipeline.request = request
    assert settled_budget(pipeline, profile) is None


@pytest.mark.parametrize(
    ("budget", "provisional", "limit"),
    [
        (1.5, True, 0.75),
        (1.5, False, 1.5),
        ("2MiB", True, 0.5),
        ("2MiB", False, 0.5),
        ([1.0, "1GiB"], True, None),
        (0.55, True, None),
    ],
)
def test_a_first_plan_keeps_clear_of_the_budget(budget, provisional: bool, limit: float | None):
    """Assumed bytes: half the budget, or the least that runs."""
    module = MODELS["tokens"]()
    stack = find_layers(module, None)
    replan = Replan.ORDER if provisional else Replan.OFF
    request = PlanRequest(schedule="zb-v", memory_budget=budget, partition="even", costs=None, replan=replan)
    chosen = choose_plan(request, module, stack, 2, 8, lambda value: value, True).plan
    whole = chosen.costs.activation_bytes
    if limit is not None:
        assert chosen.memory_limit == (limit * whole, limit * whole)
    assert max(chosen.predicted.peak_bytes) <= (budget if isinstance(budget, float) else 1.0) * whole


@pytest.mark.parametrize("replan", [Replan.OFF, Replan.ORDER, Replan.PLACEMENT])
def test_a_search_that_may_begin_again_starts_as_zb_v(replan: Replan):
    """Nothing is searched with assumed costs where a search with measured ones may change everything."""
    module = MODELS["tokens"]()
    request = PlanRequest(schedule="auto", memory_budget=None, partition=None, costs=None, replan=replan)
    chosen = choose_plan(request, module, find_layers(module, None), 2, 8, lambda value: value, True).plan
    assert chosen.planner.name == ("zb-v" if replan is Replan.PLACEMENT else "auto")
    assert max(chosen.predicted.peak_bytes) <= chosen.costs.activation_bytes


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


def test_a_search_is_told_how_long_it_may_take():
    """Two schedules that search share the time; without time only the first is asked."""
    running = make_plan(EQUAL, 2, 8, "zb-v", 2.0)
    started = time.perf_counter()
    decision = decide(running, UNEQUAL, Replan.PLACEMENT, "auto", 2.0, seconds=0.5)
    assert decision.change != "nothing"
    assert 0 < decision.seconds <= time.perf_counter() - started
    assert "the time for planning is over" in decide(running, UNEQUAL, Replan.ORDER, "zb", 2.0, seconds=0.0).reason


def test_devices_that_run_ahead_are_planned_by_period():
    """zb on a sequential placement: the period of steps that follow each other is shorter than one step end to end."""
    plan = make_plan(EQUAL, 2, 8, "zb", 2.0)
    assert step_seconds(True)(plan) == plan.predicted.period < plan.predicted.makespan == step_seconds(False)(plan)
    running = make_plan(EQUAL, 2, 8, "1f1b")
    for ahead in (False, True):
        decision = decide(running, EQUAL, Replan.PLACEMENT, "1f1b", 2.0, runs_ahead=ahead)
        figure = step_seconds(ahead)
        assert f"saves {100 * (1 - figure(decision.plan) / figure(running)):.1f} % of a step" in decision.reason
        assert figure(decision.plan) <= figure(plan)
