"""Timelines as pictures: one row a device, planned above, measured below, memory under them. The one user of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zb.planning.budget import byte_unit
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.schedule import PassKind
from lightning_zb.planning.timeline import Timeline, bubble_rate, memory_curves, planned_timeline
from lightning_zb.report.colours import COLOURS, rgb, shades

_ROW_INCHES = 0.32
_TEXT_COLOUR = "white"


def timeline_picture(plan: Plan, path: str | Path, measured: Timeline | None = None, peak_bytes: Any = ()) -> None:
    """Draw a plan, and how it really ran.

    Args:
        plan: what was planned.
        path: where to; the suffix says the format.
        measured: a step as it ran, None to show the plan alone.
        peak_bytes: by device the activation bytes measured at their peak; empty to leave them out.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure_class, canvas_class = _matplotlib()
    planned = planned_timeline(plan)
    timelines = [("planned", planned)] + ([] if measured is None else [("measured", measured)])
    has_memory = plan.costs.activation_bytes > 0
    rows = max(2.2, _ROW_INCHES * plan.num_devices + 0.85)
    heights = [rows] * len(timelines) + ([2.2] if has_memory else [])
    figure = figure_class(figsize=(15, sum(heights) + 0.5), layout="constrained")
    canvas_class(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    scale, unit = _time_unit(max(t.makespan for _, t in timelines))
    longest = max(t.makespan for _, t in timelines) * scale
    for ax, (name, timeline) in zip(axes, timelines, strict=False):
        ax.set_xlim(0, longest * 1.005)
        _draw_passes(ax, timeline, scale, figure.get_figwidth())
        ax.set_title(_title(name, plan, timeline, scale, unit), loc="left", fontsize=10)
    if has_memory:
        _draw_memory(axes[-1], plan, planned, scale, peak_bytes)
    axes[-1].set_xlabel(f"time ({unit})")
    _legend(figure, [timeline for _, timeline in timelines])
    figure.savefig(path, dpi=150)


def svg(plan: Plan, path: str | Path) -> None:
    """Draw a plan as SVG; see `timeline_picture`."""
    timeline_picture(plan, Path(path).with_suffix(".svg"))


def _matplotlib() -> tuple[Any, Any]:
    """Figures without pyplot: no window, no state shared with the user's own plots."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib; install it with pip install "lightning-zb[report]"') from error
    return Figure, FigureCanvasAgg


def _time_unit(seconds: float) -> tuple[float, str]:
    """Factor from seconds, and the unit's name."""
    if seconds >= 2:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def _title(name: str, plan: Plan, timeline: Timeline, scale: float, unit: str) -> str:
    step = timeline.step_time
    what = f"{plan.planner.name}, {plan.num_microbatches} microbatches, " if name == "planned" else ""
    whole = f"step {scale * step:.4g} {unit}, end to end {scale * timeline.makespan:.4g} {unit}"
    return f"{name}: {what}{whole}, bubble {100 * bubble_rate(plan, timeline):.1f} %"


def _draw_passes(ax: Any, timeline: Timeline, scale: float, width_inches: float) -> None:
    shade = shades(timeline)
    zero = min(t for starts in timeline.starts for t in starts)
    points = 72 * 0.93 * width_inches / ax.get_xlim()[1]  # of the page for a unit of time
    for device, (order, starts, ends) in enumerate(zip(timeline.orders, timeline.starts, timeline.ends, strict=True)):
        spans = [((a - zero) * scale, (b - a) * scale) for a, b in zip(starts, ends, strict=True)]
        colours = [rgb(p, shade[p.chunk]) for p in order]
        edge = min(0.5, 0.03 * points * min((length for _, length in spans), default=0.0))  # none where bars are hairlines
        ax.broken_barh(spans, (device - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidth=edge)
        for p, (start, length) in zip(order, spans, strict=True):
            label = str(p.microbatch)
            size = min(8.0, 1.6 * points * length / (len(label) + 0.6))
            if size >= 4.5:
                ax.text(start + length / 2, device, label, ha="center", va="center_baseline", fontsize=size, color=_TEXT_COLOUR)
    ax.set_ylim(timeline.num_devices - 0.5, -0.5)
    ax.set_yticks(range(timeline.num_devices), [f"device {d}" for d in range(timeline.num_devices)])
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _draw_memory(ax: Any, plan: Plan, planned: Timeline, scale: float, peak_bytes: Any) -> None:
    curves = memory_curves(plan.schedule, plan.placement, plan.costs.chunks(plan.partition))
    largest = max([*plan.predicted.peak_bytes, *peak_bytes, 1.0])
    size, unit = byte_unit(largest)
    from matplotlib import colormaps

    palette = colormaps["viridis"].resampled(max(2, plan.num_devices + 1))
    zero = min(t for starts in planned.starts for t in starts)
    for device, (curve, starts, ends, order) in enumerate(
        zip(curves, planned.starts, planned.ends, planned.orders, strict=True)
    ):
        held, times = [0.0], [0.0]
        for p, start, end, value in zip(order, starts, ends, curve, strict=True):
            times.append(((start if p.kind is PassKind.FORWARD else end) - zero) * scale)  # F holds what it saves as it runs
            held.append(value / size)
        label = f"device {device}: {plan.predicted.peak_bytes[device] / size:.2f}"
        if len(peak_bytes):
            label += f", measured {peak_bytes[device] / size:.2f}"
        ax.step(times, held, where="post", color=palette(device), linewidth=1.1, label=label)
    highest = largest
    for limit in sorted(set(plan.memory_limit or ())):
        if 0 < limit < 3 * largest:  # else it would flatten the curves
            ax.axhline(limit / size, color="#c0392b", linestyle="--", linewidth=1.0)
            ax.text(0, limit / size, " limit", color="#c0392b", fontsize=8, va="bottom")
            highest = max(highest, limit)
    ax.set_ylim(0, 1.15 * highest / size)
    ax.set_ylabel(f"activations ({unit})")
    ax.set_title("activation memory of the plan, and peaks", loc="left", fontsize=10)
    if plan.num_devices <= 8:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        ax.legend(**place, ncols=min(4, plan.num_devices), fontsize=7.5, frameon=False, handlelength=1.2, columnspacing=1.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    orders = [order for timeline in timelines for order in timeline.orders]
    kinds = [kind for kind in PassKind if any(p.kind is kind for order in orders for p in order)]
    names = {
        PassKind.FORWARD: "F forward",
        PassKind.BACKWARD_INPUT: "B input gradient",
        PassKind.BACKWARD_WEIGHT: "W weight gradient",
        PassKind.BACKWARD: "BW whole backward",
    }
    handles = [Patch(color=COLOURS[kind], label=names[kind]) for kind in kinds]
    if any(len({p.chunk for p in order}) > 1 for order in orders):
        handles.append(Patch(facecolor="#777777", edgecolor="none", label="darker: a device's later chunk"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
