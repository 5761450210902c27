"""recipes/plan.py: plans that a run accepts, from a model or a costs file, without training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_zb.planning.budget import InfeasibleBudget
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import read_plan
from recipes.train import train
from recipes.typed_config import check_config
from tests.test_conf import CONF, composed


def planned(folder: Path, *overrides: str) -> list[Plan]:
    small = [
        *(["model=sequential"] if "~model" not in overrides else []),
        "devices=2",
        "microbatches=4",
        "effort=1",
        f"folder={folder}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("plan", [*small, *overrides])
    check_config(config)
    return instantiate(config).run()


def test_the_fastest_plan_comes_first_and_every_plan_is_written(tmp_path, capsys):
    plans = planned(tmp_path, "schedules=[1f1b,zb-h1,auto]")
    times = [plan.predicted.step_time for plan in plans]
    assert times == sorted(times)
    assert {plan.planner.name for plan in plans} == {"1f1b", "zb-h1", "auto"}
    for plan in plans:
        assert read_plan(tmp_path / f"{plan.planner.name}.json").predicted == plan.predicted
    output = capsys.readouterr().out
    assert "Planning auto (3 of 3)" in output
    assert "bubble" in output


def test_a_costs_file_replaces_the_model(tmp_path):
    plans = planned(tmp_path / "model", "schedules=[1f1b]")
    again = planned(tmp_path / "file", "schedules=[1f1b]", "~model", f"costs={tmp_path}/model/costs.json")
    assert again[0].predicted == plans[0].predicted


def test_a_schedule_that_does_not_fit_leaves_the_others(tmp_path, capsys):
    plans = planned(tmp_path, "schedules=[1f1b,zb]", "memory_budget=0.8")
    assert [plan.planner.name for plan in plans] == ["zb"]
    assert "'1f1b' does not fit memory_budget=0.8; the smallest that fits is 1." in capsys.readouterr().out
    with pytest.raises(InfeasibleBudget, match=r"memory_budget=0\.01; the smallest that fits is"):
        planned(tmp_path, "schedules=[1f1b,zb]", "memory_budget=0.01")


def test_training_runs_a_plan_file(tmp_path):
    planned(tmp_path / "plans", "schedules=[zb-h1]")
    run = ["model=sequential", "debug=few_steps", "threads=1", "trainer.devices=1", "+strategy.virtual_devices=2"]
    trainer = train(composed(tmp_path / "run", *run, f"strategy.schedule={tmp_path}/plans/zb-h1.json"))
    assert trainer.strategy.plan == read_plan(tmp_path / "plans" / "zb-h1.json")


@pytest.mark.parametrize(
    ("override", "message"),
    [("devices=two", "devices='two' is not int"), ("microbatches=1.5", "microbatches=1.5 is not int")],
)
def test_wrong_values_are_named(override, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        planned(tmp_path, override)


def test_without_model_and_costs_it_says_what_to_write(tmp_path):
    with pytest.raises(ValueError, match="write model=hybrid or costs=FILE"):
        planned(tmp_path, "~model")
