"""Whole sweeps of recipes/train.py: a folder and processes for each job, failures reported, nothing left behind."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from recipes.sweep import PICTURE_FILE_NAME, TABLE_FILE_NAME
from recipes.train import train
from tests.recipes.leftovers import all_end
from tests.recipes.test_train import Job, logged_losses, run
from tests.test_conf import composed

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def sweep(folder: Path, *overrides: str) -> tuple[Job, list[dict[str, str]]]:
    """Run a sweep with short jobs.

    Returns:
        How it ended, and its table.
    """
    job = run(folder / "unused", "model=sequential", f"hydra.sweep.dir={folder}", *overrides, "-m", seconds=900)
    assert (folder / TABLE_FILE_NAME).exists(), job.output
    assert (folder / PICTURE_FILE_NAME).exists(), job.output
    assert all_end(str(folder))
    with open(folder / TABLE_FILE_NAME) as file:
        return job, list(csv.DictReader(file))


def assert_whole(row: dict[str, str]) -> None:
    """Every column of a job that ended well has a value."""
    assert row["result"] == "finished"
    assert "-" not in (row["bubble predicted"], row["bubble measured"], row["peak memory (MiB)"], row["tokens/s"])


def test_devices_and_schedules(tmp_path):
    job, rows = sweep(tmp_path, "trainer.devices=2,1", "strategy.schedule=1f1b,zb-v")
    assert job.returncode == 0, job.output
    assert [(row["devices"], row["schedule"]) for row in rows] == [("2", "1f1b"), ("2", "zb-v"), ("1", "1f1b"), ("1", "zb-v")]
    for row in rows:
        assert_whole(row)
    train(composed(tmp_path / "plain", "model=sequential", "strategy=plain", "debug=few_steps", "threads=1"))
    expected = logged_losses(tmp_path / "plain")
    assert [logged_losses(tmp_path / str(number)) for number in range(4)] == [expected] * 4


def test_jobs_that_raise_or_are_killed_leave_the_others_and_the_table(tmp_path):
    deeds = ["raise@1", "kill@0", "kill@1", "none"]
    job, rows = sweep(
        tmp_path, "+callbacks.fault._target_=tests.recipes.fault.Fault", f"+callbacks.fault.deed={','.join(deeds)}"
    )
    assert job.returncode == 1, job.output
    assert [row["job"] for row in rows] == [f"{number} +callbacks.fault.deed={deed}" for number, deed in enumerate(deeds)]
    assert [row["result"] for row in rows[:3]] == [
        "failed: ValueError: something is wrong on rank 1",
        "failed: its first process was ended by SIGKILL",
        "failed: ChildProcessError: the process of rank 1 was ended by SIGKILL",
    ]
    assert_whole(rows[3])
    assert "3 of 4 jobs failed: 0, 1, 2" in job.output


def test_spawned_processes_and_a_budget_that_nothing_fits(tmp_path):
    job, rows = sweep(tmp_path, "strategy.start_method=spawn", "strategy.memory_budget=0.01,1.0")
    assert job.returncode == 1, job.output
    assert "does not fit memory_budget=0.01; the smallest that fits is" in rows[0]["result"]
    assert_whole(rows[1])


def test_optuna_minimises_the_objective(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="extra optuna")
    job, rows = sweep(tmp_path, "search=optuna", "hydra.sweeper.n_trials=2", "objective=val_loss")
    assert job.returncode == 0, job.output
    for row in rows:
        assert_whole(row)
    assert len(rows) == 2
    best = min(float(row["final loss"]) for row in rows)
    text = (tmp_path / "optimization_results.yaml").read_text()
    assert float(text.split("best_value:")[1].split()[0]) == pytest.approx(best, abs=1e-4)
