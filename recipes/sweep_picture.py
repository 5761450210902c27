"""The picture of a sweep: throughput and bubbles against the memory budget, or job by job where no budgets were swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.sweep_jobs import Job

_FAILED = "#c0392b"


def draw(jobs: Sequence[Job], path: Path) -> None:
    """Draw a sweep.

    Args:
        jobs: of the sweep; those that failed are marked.
        path: of the picture; the suffix says the format.
    """
    budgets = [_number(job.memory_budget) for job in jobs]
    numbers = [budget for budget in budgets if budget is not None]
    has_budgets = len(numbers) == len(jobs) and len(set(numbers)) > 1
    places = numbers if has_budgets else [float(index) for index in range(len(jobs))]
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, bubble = figure.subplots(2, 1, sharex=True)
    for index, (name, points) in enumerate(_groups(jobs, places, by_name=has_budgets).items()):
        _draw_group(throughput, bubble, name, points, f"C{index}")
    _mark_failed(throughput, jobs, places)
    throughput.set_ylabel("tokens per second")
    throughput.set_ylim(0, 1.08 * throughput.get_ylim()[1])
    bubble.set_ylabel("bubble rate (%)")
    bubble.plot([], [], "o-" if has_budgets else "o", color="#555555", label="measured")
    bubble.plot([], [], "s--" if has_budgets else "s", color="#555555", markerfacecolor="none", label="predicted")
    bubble.set_ylim(min(0.0, bubble.get_ylim()[0]), 1.08 * bubble.get_ylim()[1])
    bubble.set_xlabel("memory budget (activations of one microbatch of the whole model)" if has_budgets else "job")
    if has_budgets:
        bubble.set_xticks(sorted(set(places)), [f"{place:g}" for place in sorted(set(places))])
    else:
        bubble.set_xticks(places, [_label(job) for job in jobs], rotation=20 if len(jobs) > 4 else 0)
        bubble.set_xlim(-0.5, len(jobs) - 0.5)
    for ax in (throughput, bubble):
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)


def _number(budget: Any) -> float | None:
    return float(budget) if isinstance(budget, (int, float)) else None


def _groups(jobs: Sequence[Job], places: Sequence[float], by_name: bool) -> dict[str, list[tuple[float, Job]]]:
    """The jobs that ended well: a line for each schedule and number of devices, or all without a line between them."""
    groups: dict[str, list[tuple[float, Job]]] = {}
    for place, job in sorted(zip(places, jobs, strict=True), key=lambda point: point[0]):
        if job.summary is not None:
            name = f"{job.summary.schedule}, {job.summary.num_devices} devices" if by_name else ""
            groups.setdefault(name, []).append((place, job))
    return groups


def _draw_group(throughput: Any, bubble: Any, name: str, points: Sequence[tuple[float, Job]], colour: str) -> None:
    places = [place for place, _ in points]
    summaries = [job.summary for _, job in points if job.summary is not None]
    line = "-" if name else ""
    throughput.plot(places, [s.tokens_per_second for s in summaries], "o" + line, color=colour, label=name or None)
    nothing = float("nan")
    measured = [nothing if s.bubble_measured is None else 100 * s.bubble_measured for s in summaries]
    predicted = [nothing if s.bubble_predicted is None else 100 * s.bubble_predicted for s in summaries]
    bubble.plot(places, measured, "o" + line, color=colour)
    bubble.plot(places, predicted, "s" + (line and "--"), color=colour, markerfacecolor="none")


def _mark_failed(ax: Any, jobs: Sequence[Job], places: Sequence[float]) -> None:
    failed = [place for place, job in zip(places, jobs, strict=True) if job.summary is None]
    if failed:
        ax.plot(failed, [0.0] * len(failed), "x", color=_FAILED, markersize=9, clip_on=False, label="failed")


def _label(job: Job) -> str:
    devices = job.devices if job.summary is None else job.summary.num_devices
    budget = "" if job.memory_budget is None else f"\nbudget {job.memory_budget}"
    return f"{job.name}: {job.schedule}\n{devices} devices{budget}"
