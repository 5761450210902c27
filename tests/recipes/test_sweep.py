"""The table and the picture of a sweep, from folders as jobs leave them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes.jobs import FAILURE_FILE_NAME
from recipes.summary import Summary
from recipes.sweep import COLUMNS, PICTURE_FILE_NAME, TABLE_FILE_NAME, SweepReport, main, report
from recipes.sweep_jobs import read_jobs
from tests.recipes.test_summary import SUMMARY


def leave_job(folder: Path, overrides: list[str], result: Summary | str | None) -> None:
    """What a job leaves behind: its configuration, and a summary or the reason why it failed."""
    config = OmegaConf.create({"trainer": {"devices": 2}, "strategy": {"schedule": "zb-v", "memory_budget": None}})
    config = OmegaConf.merge(config, OmegaConf.from_dotlist(overrides))
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    if isinstance(result, str):
        (folder / FAILURE_FILE_NAME).write_text(result)
    elif result is not None:
        result.write(folder)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / TABLE_FILE_NAME) as file:
        return list(csv.DictReader(file))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    common = ["model.width=64"]
    leave_job(tmp_path / "0", [*common, "strategy.memory_budget=0.5"], "InfeasibleBudget: 0.5 is too small; write 0.8\nmore")
    for job, budget in [(1, 1.0), (2, 1.5), (10, 2.0)]:
        overrides = [*common, f"strategy.memory_budget={budget}", f"seed={job}"]
        leave_job(tmp_path / str(job), overrides, replace(SUMMARY, memory_budget=budget, tokens_per_second=1000.0 * budget))
    leave_job(tmp_path / "11", [*common, "strategy.memory_budget=3.0"], None)
    return tmp_path


def test_a_row_for_each_job_in_the_order_in_which_they_ran(sweep):
    text = report(sweep)
    rows = rows_of(sweep)
    assert tuple(rows[0]) == COLUMNS
    assert [row["job"] for row in rows] == ["0", "1 seed=1", "2 seed=2", "10 seed=10", "11"]
    assert [row["budget"] for row in rows] == ["0.5", "1.0", "1.5", "2.0", "3.0"]
    assert [row["tokens/s"] for row in rows] == ["-", "1000", "1500", "2000", "-"]
    assert rows[1]["bubble predicted"] == "5.0%"
    assert rows[1]["bubble measured"] == "6.2%"
    assert rows[1]["peak memory (MiB)"] == "512 256"
    assert rows[1]["final loss"] == "2.2500"
    assert [row["result"] for row in rows if row["result"] != "finished"] == [
        "failed: InfeasibleBudget: 0.5 is too small; write 0.8",
        "failed: it did not end",
    ]
    assert all(row["result"] in text for row in rows)


def test_picture_of_budgets_and_of_other_sweeps(sweep, tmp_path):
    pytest.importorskip("matplotlib")
    report(sweep)
    assert (sweep / PICTURE_FILE_NAME).read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other"
    for job, schedule in enumerate(["1f1b", "zb-v"]):
        leave_job(other / str(job), [f"strategy.schedule={schedule}"], replace(SUMMARY, schedule=schedule, memory_budget=None))
    report(other)
    assert (other / PICTURE_FILE_NAME).exists()


def test_a_sweep_without_any_result_has_a_table(tmp_path):
    leave_job(tmp_path / "0", [], "ValueError: no")
    assert "no job ended well" in report(tmp_path)
    assert not (tmp_path / PICTURE_FILE_NAME).exists()


def test_jobs_of_torchrun_are_read_without_its_variables(tmp_path):
    leave_job(tmp_path / "0", ["trainer.devices=${oc.env:LOCAL_WORLD_SIZE}"], "ValueError: no")
    assert read_jobs(tmp_path)[0].devices is None


def test_folder_without_jobs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        main([str(tmp_path)])


def test_end_of_a_sweep_prints_the_table_and_says_which_jobs_failed(sweep, capsys):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})
    with pytest.raises(SystemExit, match="2 of 5 jobs failed: 0, 11"):
        SweepReport().on_multirun_end(config)
    assert "bubble predicted" in capsys.readouterr().out


@pytest.mark.parametrize("variables", [{"TORCHELASTIC_RUN_ID": "none"}, {"SLURM_STEP_NUM_TASKS": "2"}])
def test_processes_of_torchrun_and_srun_do_not_sweep(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="one job at a time"):
        SweepReport().on_multirun_start(OmegaConf.create({}))
