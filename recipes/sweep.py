"""What a sweep achieved: a table of its jobs, and a picture of throughput against memory budget.

`python -m recipes.sweep FOLDER` makes them again from the folder of a sweep, also of one that was interrupted.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_zb.cli.text import table
from recipes.sweep_jobs import Job, read_jobs

TABLE_FILE_NAME = "sweep.csv"
PICTURE_FILE_NAME = "sweep.png"

COLUMNS: tuple[str, ...] = (
    "job",
    "devices",
    "schedule",
    "budget",
    "bubble predicted",
    "bubble measured",
    "peak memory (MiB)",
    "tokens/s",
    "final loss",
    "result",
)
_OWN_COLUMNS = ("strategy.schedule", "strategy.memory_budget", "trainer.devices")


def report(folder: Path) -> str:
    """Write a sweep's table and picture into its folder.

    Args:
        folder: of the sweep; holds a folder for each job.

    Returns:
        The table as text, and where the files are.
    """
    jobs = read_jobs(folder)
    common = set.intersection(*(set(job.overrides) for job in jobs))
    rows = [_cells(job, common) for job in jobs]
    with open(folder / TABLE_FILE_NAME, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    lines = [table(COLUMNS, rows, left=(0, 2, len(COLUMNS) - 1)), f"written to {folder / TABLE_FILE_NAME}"]
    if not any(job.summary for job in jobs):
        lines.append("no picture: no job ended well")
    elif find_spec("matplotlib") is None:
        lines.append('no picture: it needs matplotlib; install it with pip install "lightning-zb[report]"')
    else:
        from recipes.sweep_picture import draw  # here alone matplotlib is needed

        draw(jobs, folder / PICTURE_FILE_NAME)
        lines.append(f"written to {folder / PICTURE_FILE_NAME}")
    return "\n".join(lines)


def _cells(job: Job, common: set[str]) -> tuple[str, ...]:
    """A job's line; its name says what sets it apart from the others and has no column of its own."""
    budget = "-" if job.memory_budget is None else str(job.memory_budget)
    summary = job.summary
    own = (text for text in job.overrides if text not in common and text.split("=")[0] not in _OWN_COLUMNS)
    name = " ".join((job.name, *own))
    if summary is None:
        return (name, str(job.devices), job.schedule, budget, *["-"] * 5, f"failed: {job.failure}")
    return (
        name,
        str(summary.num_devices),
        summary.schedule,
        budget,
        _format(summary.bubble_predicted, "{:.1%}"),
        _format(summary.bubble_measured, "{:.1%}"),
        " ".join(f"{peak / 2**20:.0f}" for peak in summary.peak_memory),
        _format(summary.tokens_per_second, "{:.0f}"),
        _format(summary.val_loss if summary.val_loss is not None else summary.train_loss, "{:.4f}"),
        "finished",
    )


def _format(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


class SweepReport(Callback):
    """Reports at the end of a Hydra sweep; the exit code says whether every job ended well."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Every process that torchrun or srun starts would run the whole sweep.
        if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise SystemExit(
                "torchrun and srun start one job at a time, without --multirun: start them once for each job with "
                "hydra.run.dir=sweeps/NAME/0, .../1 and so on, then python -m recipes.sweep sweeps/NAME makes the table"
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir).absolute()
        print(f"\n{report(folder)}", flush=True)
        jobs = read_jobs(folder)
        failed = [job.name for job in jobs if job.failure is not None]
        if failed:
            raise SystemExit(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")


def main(arguments: Sequence[str]) -> None:
    """Print the table of a sweep's folder, and write it and the picture again."""
    (folder,) = arguments
    print(report(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
