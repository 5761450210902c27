"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_zb.planning.plan import Plan
from lightning_zb.planning.schedule import Pass, PassKind
from lightning_zb.planning.timeline import Interval, Timeline, planned_timeline

_COMPUTE, _WAIT = 0, 1
_NAMES = {PassKind.FORWARD: "thread_state_running", PassKind.BACKWARD_INPUT: "rail_response"}
_NAMES |= {PassKind.BACKWARD_WEIGHT: "good", PassKind.BACKWARD: "rail_animation"}


def chrome_trace(what: Plan | Timeline, path: str | Path) -> None:
    """Write a trace: one process for each device, its passes and waits as tracks, transfers as arrows.

    Args:
        what: a plan, or a timeline, predicted or measured.
        path: a `.json` file.
    """
    timeline = planned_timeline(what) if isinstance(what, Plan) else what
    Path(path).write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of a trace, times in microseconds."""
    timeline = _not_before_zero(timeline)
    events: list[dict[str, Any]] = []
    for device in range(timeline.num_devices):
        events.append(_about(device, _COMPUTE, "process_name", name=f"device {device}"))
        events.append(_about(device, _COMPUTE, "process_sort_index", sort_index=device))
        for track, name in ((_COMPUTE, "compute"), (_WAIT, "wait")):
            events.append(_about(device, track, "thread_name", name=name))
            events.append(_about(device, track, "thread_sort_index", sort_index=track))
    for device, (order, starts, ends) in enumerate(zip(timeline.orders, timeline.starts, timeline.ends, strict=True)):
        for p, start, end in zip(order, starts, ends, strict=True):
            arguments = {"kind": p.kind.value, "chunk": p.chunk, "microbatch": p.microbatch}
            events.append(_complete(str(p), device, _COMPUTE, (start, end)) | {"cname": _NAMES[p.kind], "args": arguments})
        events += [_complete("wait", device, _WAIT, interval) for interval in device_waits(timeline, device)]
    return events + _arrows(timeline)


def _not_before_zero(timeline: Timeline) -> Timeline:
    """Perfetto drops what begins before zero, as a measured wait for the first input may."""
    first = min((start for waits in timeline.waits for start, _ in waits), default=0.0)
    if first >= 0.0:
        return timeline
    starts, ends = (tuple(tuple(t - first for t in device) for device in times) for times in (timeline.starts, timeline.ends))
    waits = tuple(tuple((start - first, end - first) for start, end in device) for device in timeline.waits)
    return replace(timeline, starts=starts, ends=ends, waits=waits)


def device_waits(timeline: Timeline, device: int) -> list[Interval]:
    """When a device stood waiting: as measured, or the gaps between its passes."""
    if timeline.waits:
        return list(timeline.waits[device])
    starts, ends = timeline.starts[device], timeline.ends[device]
    return [(end, start) for end, start in zip(ends, starts[1:], strict=False) if start > end]


def _arrows(timeline: Timeline) -> list[dict[str, Any]]:
    """From the end of each pass whose output goes to another device to the start of the pass that needs it."""
    devices = {p.chunk: device for device, order in enumerate(timeline.orders) for p in order}
    times = timeline.times()
    streams = {(kind, p.chunk, p.microbatch): p for p in times for kind in p.kind.value}
    events: list[dict[str, Any]] = []
    for (stream, chunk, microbatch), p in streams.items():
        if stream == "W":
            continue
        user = streams.get((stream, chunk + (1 if stream == "F" else -1), microbatch))
        if user is not None and devices[user.chunk] != devices[chunk]:
            events += _arrow(len(events) // 2, p, user, devices, times)
    return events


def _arrow(
    number: int, sender: Pass, receiver: Pass, devices: dict[int, int], times: dict[Pass, Interval]
) -> list[dict[str, Any]]:
    common = {"name": f"{sender} to {receiver}", "cat": "transfer", "id": number}
    # just inside the slices: an arrow belongs to the slice that is open at its time
    inside = 1e-3 * (times[sender][1] - times[sender][0])
    return [
        {**common, "ph": "s", **_track(devices[sender.chunk], _COMPUTE), "ts": _microseconds(times[sender][1] - inside)},
        {**common, "ph": "f", "bp": "e", **_track(devices[receiver.chunk], _COMPUTE), "ts": _microseconds(times[receiver][0])},
    ]


def _track(device: int, track: int) -> dict[str, int]:
    """Numbers that no two tracks share: to Perfetto 0 is the idle task, and a thread numbered as a process its main one."""
    return {"pid": device + 1, "tid": 1000 * (device + 1) + track}


def _about(device: int, track: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", **_track(device, track), "args": arguments}


def _complete(name: str, device: int, track: int, interval: Interval) -> dict[str, Any]:
    start, end = map(_microseconds, interval)
    return {"name": name, "ph": "X", **_track(device, track), "ts": start, "dur": round(end - start, 3)}


def _microseconds(seconds: float) -> float:
    """Rounded to the nanoseconds that Perfetto counts in, so that a slice never ends after the next one's start."""
    return round(1e6 * seconds, 3)
