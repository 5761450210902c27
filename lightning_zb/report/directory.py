"""All reports of a run in one directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import write_costs, write_plan
from lightning_zb.planning.timeline import Timeline
from lightning_zb.report.picture import timeline_picture
from lightning_zb.report.summary import NOTHING, Observed, summary
from lightning_zb.report.trace import chrome_trace, device_waits

_PICTURE = "timeline.png"


def write_report(directory: Path, plan: Plan, observed: Observed = NOTHING) -> None:
    """Write plan.json, costs.json, measured.json, summary.md, traces, and the picture where matplotlib is installed.

    Args:
        directory: is made; older reports in it are replaced.
        plan: what runs.
        observed: what happened.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_plan(plan, directory / "plan.json")
    write_costs(plan.costs, directory / "costs.json")
    chrome_trace(plan, directory / "trace_planned.json")
    step, peak_bytes = observed.step, observed.peak_bytes
    if step is not None:
        chrome_trace(step, directory / "trace_measured.json")
        (directory / "measured.json").write_text(json.dumps(_figures(step, peak_bytes), indent=1) + "\n")
    if find_spec("matplotlib") is not None:
        timeline_picture(plan, directory / _PICTURE, step, peak_bytes)
    write_summary(directory, plan, observed)


def write_summary(directory: Path, plan: Plan, observed: Observed = NOTHING) -> None:
    """Write summary.md alone; arguments as for `write_report`."""
    directory.mkdir(parents=True, exist_ok=True)
    text = summary(plan, observed)
    if (directory / _PICTURE).exists():
        text += f"\n![The step as planned and as measured]({_PICTURE})\n"
    (directory / "summary.md").write_text(text)


def _figures(measured: Timeline, peak_bytes: Sequence[float]) -> dict[str, Any]:
    """What a step measured to, under the names of a plan file's `predicted`. Seconds and bytes."""
    waits = [sum(end - start for start, end in device_waits(measured, d)) for d in range(measured.num_devices)]
    return {
        "step_time": measured.step_time,
        "makespan": measured.makespan,
        "idle_fraction": measured.idle_fraction,
        "peak_bytes": list(peak_bytes),
        "busy": list(measured.busy),
        "waits": waits,
    }
