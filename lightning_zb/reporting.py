"""What a run tells of itself: figures for the loggers while it goes on, a directory of reports, counters at its end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_zb import device_memory
from lightning_zb.execution.statistics import STEP_COUNTERS
from lightning_zb.pipeline import Pipeline
from lightning_zb.planning.plan import Plan
from lightning_zb.profile_window import Profile
from lightning_zb.replanning import LoggedDecision, step_seconds
from lightning_zb.report.directory import write_report, write_summary
from lightning_zb.report.summary import Observed


def runs_ahead(pipeline: Pipeline) -> bool:
    """Whether devices begin a step without waiting for the others to end the one before."""
    return pipeline.ending is not None and pipeline.ending.runs_ahead


def log(
    trainer: Any, num_steps: int, pipeline: Pipeline, plan: Plan | None, step_times: Sequence[float], peak_bytes: float
) -> None:
    """Give the loggers what rank 0 sees, every so many steps; no exchange with others.

    Args:
        trainer: has the loggers, and says how often.
        num_steps: steps so far.
        pipeline: see `figures`, as for the rest.
    """
    if not trainer.loggers or num_steps % max(1, trainer.log_every_n_steps // max(1, trainer.accumulate_grad_batches)):
        return
    found = figures(pipeline, plan, step_times, peak_bytes)
    for logger in trainer.loggers:
        logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def figures(pipeline: Pipeline, plan: Plan | None, step_times: Sequence[float], peak_bytes: float) -> dict[str, float]:
    """The figures that loggers get, of what rank 0 sees and of what came to it with verdicts; no exchange of their own.

    Args:
        pipeline: what runs.
        plan: with measured costs; None as long as nothing is measured, then there are counters only.
        step_times: seconds of recent steps at full speed.
        peak_bytes: activation bytes measured at their peak, for a device that does not count what it has allocated.
    """
    counters = {} if pipeline.ending is None else pipeline.ending.counters
    found = {f"zb/{counter}": count for counter, count in counters.items()}
    if plan is not None and step_times:
        measured = statistics.median(step_times)
        found["zb/bubble_rate"] = (measured - plan.ideal_seconds) / measured
        found["zb/step_time_predicted"] = step_seconds(runs_ahead(pipeline))(plan)
        found["zb/step_time_measured"] = measured
        found["zb/peak_memory"] = device_memory.allocated_peak(pipeline.device) or peak_bytes
    return found


def gather_counters(pipeline: Pipeline) -> dict[str, dict[str, int]]:
    """For each device how its optimizer steps ended, on rank 0 (a collective); devices in one process are counted together."""
    counted = pipeline.statistics
    own = pipeline.devices, {counter: counted[counter] for counter in STEP_COUNTERS}
    parts = pipeline.gather(own) or []
    return {", ".join(map(str, devices)): counters for devices, counters in sorted(parts, key=lambda part: part[0])}


def write(
    trainer: Any,
    plan: Plan,
    profile: Profile | None,
    decisions: Sequence[LoggedDecision],
    counters: Mapping[str, Mapping[str, int]] | None = None,
    only_summary: bool = False,
) -> None:
    """Write down what was measured beside what was planned; called on every rank.

    Args:
        trainer: has the log directory.
        plan: what runs.
        profile: what was measured; None on ranks that write nothing.
        decisions: all of the run.
        counters: of optimizer steps, once training has ended.
        only_summary: whether all else was written before.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return
    log_dir = trainer.log_dir  # asking for it is a collective
    if profile is None or log_dir is None:
        return
    observed = Observed(
        step=profile.timeline,
        peak_bytes=profile.peak_bytes,
        decisions=decisions,
        items=profile.items,
        counters=counters or {},
        takes_turns=trainer.strategy.pipeline.channels is None,
    )
    folder = Path(log_dir) / "zero_bubble"
    (write_summary if only_summary else write_report)(folder, plan, observed)
    if not only_summary:
        rank_zero_info(
            f"zero_bubble: a step as planned and as measured is in {folder / 'summary.md'}, with pictures and traces beside it"
        )
