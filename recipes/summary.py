"""What a job achieved: a value, a JSON file, a line of a table.

`python -m recipes.summary FOLDER` prints the table of all jobs below a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import lightning as L
from omegaconf import DictConfig, OmegaConf

from lightning_zb import ZeroBubbleCallback
from lightning_zb.cli.text import table
from lightning_zb.planning.plan import Plan
from lightning_zb.replanning import step_seconds
from lightning_zb.reporting import runs_ahead
from recipes.measurements import Measurements

FILE_NAME = "summary.json"

HEADER: tuple[str, ...] = (
    "schedule",
    "budget",
    "step predicted",
    "step measured",
    "bubble predicted",
    "bubble measured",
    "tokens/s",
    "peak memory per device",
    "train loss",
    "val loss",
    "val bits/byte",
)

LEGEND = """\
step: seconds of an optimizer step; predicted is what the plan promises of the schedule, with the measured rest of a step.
bubble: share of the schedule's time in which a device, on average, runs no pass; predicted by the plan, and measured as what
  the schedule took beyond the work of its passes, below zero where they now run faster than when their times were measured
  (where a run is too short to measure those, the share waited for messages)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A job's results. Seconds and bytes; None where a value does not exist, as a prediction without a plan.

    Args:
        schedule: the schedule that ran, beside `auto` where that was asked for and runs another (so far); "plain" for
            Lightning's own Trainer.
        memory_budget: what the plan was allowed, as written in the configuration.
        num_devices: processes.
        num_microbatches: microbatches of a step.
        num_steps: optimizer steps.
        step_time_predicted: of the plan, where its costs were measured, with what a step takes outside its schedule.
        step_time_measured: median.
        bubble_predicted: bubble rate of the plan.
        bubble_measured: share of the median step's schedule beyond its measured work divided by the devices; where the run
            was too short to measure work, the share that devices waited for messages.
        peak_memory: of each device's process.
        tokens_per_second: at the median step.
        train_loss: of the last logged microbatch, nats.
        val_loss: of the last validation, nats.
        val_bits_per_byte: the same in bits.
    """

    schedule: str
    memory_budget: float | None
    num_devices: int
    num_microbatches: int
    num_steps: int
    step_time_predicted: float | None
    step_time_measured: float
    bubble_predicted: float | None
    bubble_measured: float | None
    peak_memory: tuple[int, ...]
    tokens_per_second: float
    train_loss: float | None
    val_loss: float | None
    val_bits_per_byte: float | None

    def write(self, folder: Path) -> None:
        """Write summary.json into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")


def summarize(trainer: L.Trainer, config: DictConfig) -> Summary:
    """Collect a fit's results.

    Args:
        trainer: the trainer at the end of training; its callbacks include Measurements.
        config: the job's configuration.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    (measurements,) = (callback for callback in callbacks if isinstance(callback, Measurements))
    plan: Plan | None = getattr(trainer.strategy, "plan", None)
    has_seconds = OmegaConf.select(config, "strategy.costs") is not None or any(
        isinstance(callback, ZeroBubbleCallback) and callback.profile is not None for callback in callbacks
    )
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Summary(
        schedule="plain" if plan is None else _schedule(trainer, plan),
        memory_budget=OmegaConf.select(config, "strategy.memory_budget"),
        num_devices=trainer.world_size,
        num_microbatches=trainer.accumulate_grad_batches,
        num_steps=trainer.global_step,
        step_time_predicted=_schedule_seconds(trainer, plan) + measurements.outside_seconds if plan and has_seconds else None,
        step_time_measured=measurements.step_time,
        bubble_predicted=None if plan is None else plan.predicted.bubble_rate,
        bubble_measured=None if plan is None else _bubble_rate(plan if has_seconds else None, measurements),
        peak_memory=measurements.peak_memory,
        tokens_per_second=measurements.tokens_per_second,
        train_loss=metrics.get("train_loss"),
        val_loss=metrics.get("val_loss"),
        val_bits_per_byte=metrics.get("val_bits_per_byte"),
    )


class WriteSummary(L.Callback):
    """Writes the summary into the job's folder as training ends, in whichever process trained.

    Args:
        config: the job's configuration.
        folder: where to.
    """

    def __init__(self, config: DictConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        summary = summarize(trainer, self.config)
        if trainer.is_global_zero:
            summary.write(self.folder)


def _schedule(trainer: L.Trainer, plan: Plan) -> str:
    """The schedule's name, and what stands in for `auto` as long as it has not measured layers, or is no worse."""
    name = plan.planner.name
    if name == "auto" or trainer.strategy.plan_request.schedule != "auto":  # type: ignore[attr-defined]
        return name
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    has_decided = any(isinstance(callback, ZeroBubbleCallback) and callback.decisions for callback in callbacks)
    return f"auto ({name}{'' if has_decided else ' until measured'})"


def _bubble_rate(plan: Plan | None, measurements: Measurements) -> float:
    """What a step takes beyond its work shared by all devices; without measured costs what devices waited."""
    if plan is None:
        return mean(measurements.wait_shares)
    seconds = measurements.step_time - measurements.outside_seconds
    return (seconds - plan.ideal_seconds) / seconds


def _schedule_seconds(trainer: L.Trainer, plan: Plan) -> float:
    """What the plan promises of a step, as optimizer steps now end: with a barrier, or without."""
    return step_seconds(runs_ahead(trainer.strategy.pipeline))(plan)  # type: ignore[attr-defined]


def read_summary(path: Path) -> Summary:
    """Read a summary.json."""
    values = json.loads(path.read_text())
    return Summary(**{**values, "peak_memory": tuple(values["peak_memory"])})


def read_summaries(folder: Path) -> list[Summary]:
    """Read every summary.json below a folder, in the order of their paths.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(folder.rglob(FILE_NAME))
    if not paths:
        raise FileNotFoundError(f"no {FILE_NAME} below {folder}; give the folder of a job or of a sweep")
    return [read_summary(path) for path in paths]


def format_table(summaries: Iterable[Summary]) -> str:
    """Lay summaries out as a table, one a line."""
    header, *lines = table(HEADER, [_cells(summary) for summary in summaries], left=()).split("\n")
    return "\n".join([header, "-" * len(header), *lines])


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        summary.schedule,
        _format(summary.memory_budget, "{:g}"),
        _format(summary.step_time_predicted, "{:.3f} s"),
        _format(summary.step_time_measured, "{:.3f} s"),
        _format(summary.bubble_predicted, "{:.1%}"),
        _format(summary.bubble_measured, "{:.1%}"),
        _format(summary.tokens_per_second, "{:.0f}"),
        ", ".join(f"{peak / 2**20:.0f}" for peak in summary.peak_memory) + " MiB",
        _format(summary.train_loss, "{:.4f}"),
        _format(summary.val_loss, "{:.4f}"),
        _format(summary.val_bits_per_byte, "{:.3f}"),
    )


def _format(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


def main(arguments: Sequence[str]) -> None:
    """Print the table of all summaries below the given folder."""
    (folder,) = arguments
    print(format_table(read_summaries(Path(folder))), LEGEND, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
