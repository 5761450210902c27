"""recipes/train.py as a user starts it: same losses from every strategy, a summary at the end, a clear end on errors."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes.summary import read_summaries
from recipes.train import run as run_recipe
from recipes.train import train
from tests.test_conf import composed

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 150  # seconds; Lightning catches SIGTERM, so the limit kills


@dataclass(frozen=True)
class Job:
    returncode: int
    output: str


def logged_losses(folder: Path) -> list[tuple[str, str]]:
    with open(folder / "metrics" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [(row["train_loss"], row["val_loss"]) for row in rows if row["train_loss"] or row["val_loss"]]


def run(folder: Path, *overrides: str, seconds: int = TIME_LIMIT) -> Job:
    command = ["timeout", "-k", "1", str(seconds), sys.executable, "recipes/train.py", "debug=few_steps", "threads=1"]
    result = subprocess.run(
        [*command, f"hydra.run.dir={folder}", *overrides],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Job(result.returncode, result.stdout)


def check(folder: Path, schedules: set[str], text: list[str]) -> None:
    """Compare every job below a folder with the plain Trainer."""
    summaries = {summary.schedule: summary for summary in read_summaries(folder)}
    assert summaries.keys() == schedules
    for summary in summaries.values():
        assert (summary.num_devices, summary.num_microbatches, summary.num_steps) == (2, 4, 4)
        assert len(summary.peak_memory) == 2
        assert summary.bubble_predicted is not None
        assert summary.bubble_measured is not None
    train(composed(folder / "plain", *text, "strategy=plain", "debug=few_steps", "threads=1"))
    losses = logged_losses(folder / "plain")
    assert len(losses) == 6  # four steps, two validations
    for path in folder.rglob("summary.json"):
        assert logged_losses(path.parent) == losses


@pytest.mark.distributed
def test_pipeline_trains_to_the_losses_of_the_plain_trainer(tmp_path, topics_folder):
    text = ["model=sequential", "data=folder", f"data.read.path={topics_folder}"]
    job = run(tmp_path, *text, "compare=null")
    assert job.returncode == 0, job.output
    for expected in ("files", "sha256", "step measured", "tokens/s"):
        assert expected in job.output
    check(tmp_path, {"auto (zb-v until measured)"}, text)


@pytest.mark.slow
@pytest.mark.distributed
def test_default_run_compares_with_1f1b(tmp_path):
    job = run(tmp_path)
    assert job.returncode == 0, job.output
    check(tmp_path, {"auto (zb-v until measured)", "1f1b"}, [])


def test_wrong_configuration_ends_with_a_sentence(tmp_path):
    job = run(tmp_path, "trainer.max_steps=few")
    assert job.returncode == 1
    assert "trainer.max_steps='few' is not int, which lightning.Trainer wants" in job.output


def test_an_objective_that_no_summary_has_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"^objective=.speed. is not a value of a summary; write one of schedule,"):
        run_recipe(composed(tmp_path, "objective=speed"))
