"""Timelines as text, for terminals."""

from __future__ import annotations

from lightning_zb.planning.plan import Plan
from lightning_zb.planning.timeline import Timeline, planned_timeline

_IDLE = "."


def terminal_grid(what: Plan | Timeline, width: int = 120) -> str:
    """One line a device, time from left to right: each pass as its kind and microbatch, as wide as it is long.

    Args:
        what: a plan, or a timeline.
        width: characters of a line.
    """
    timeline = planned_timeline(what) if isinstance(what, Plan) else what
    zero = min(t for starts in timeline.starts for t in starts)
    name_width = len(f"device {timeline.num_devices - 1} ")
    columns = width - name_width
    scale = columns / timeline.makespan if timeline.makespan > 0 else 0.0
    lines = []
    for device, (order, starts, ends) in enumerate(zip(timeline.orders, timeline.starts, timeline.ends, strict=True)):
        cells = [_IDLE] * columns
        for p, start, end in zip(order, starts, ends, strict=True):
            first, stop = round((start - zero) * scale), round((end - zero) * scale)
            label = f"{p.kind.value}{p.microbatch}"
            room = stop - first
            text = label if len(label) < room else p.kind.value if len(p.kind.value) < room else p.kind.value[:1]
            cells[first:stop] = text.ljust(room, "-")[:room]
        lines.append(f"device {device} ".ljust(name_width) + "".join(cells))
    return "\n".join(lines)
