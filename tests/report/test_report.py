"""What the reports say, and that they open."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_zb import report
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.planfile import read_costs, read_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.timeline import Timeline, bubble_rate, planned_timeline
from lightning_zb.report.directory import write_report
from lightning_zb.report.trace import trace_events


def costs() -> CostModel:
    layers = [LayerCost(f"layers.{i}", 1.0, 1.0, 1.0, 2**20, 2**19, 2**20, 2**18) for i in range(8)]
    return CostModel(tuple(layers), Link(0.1))


@pytest.fixture(scope="module")
def plan():
    return make_plan(costs(), 4, 6, "zb-v", 1.0)


@pytest.fixture(scope="module")
def measured(plan) -> Timeline:
    planned = planned_timeline(plan)
    starts, ends = (tuple(tuple(1.1 * t for t in device) for device in times) for times in (planned.starts, planned.ends))
    waits = tuple(((0.0, 0.5),) for _ in range(4))
    return Timeline(planned.orders, starts, ends, waits)


def test_the_trace_has_every_pass_every_wait_and_an_arrow_for_every_transfer(plan, measured):
    events = trace_events(measured)
    compute = [e for e in events if e["ph"] == "X" and e["name"] != "wait"]
    assert len(compute) == sum(map(len, plan.schedule.orders))
    for event in compute:
        assert event["name"] in {str(p) for p in plan.schedule.orders[event["pid"] - 1]}
    waits = [e for e in events if e["ph"] == "X" and e["name"] == "wait"]
    assert [(e["ts"], e["dur"]) for e in waits] == [(0.0, 5e5)] * 4
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    # eight chunks on a V: chunks 3 and 4 share a device; F and B cross the other six borders
    assert len(starts) == len(ends) == 2 * 6 * plan.num_microbatches
    slices = {(e["pid"], e["name"]): e for e in compute}
    for number, start in starts.items():
        sender, receiver = start["name"].split(" to ")
        assert start["pid"] != ends[number]["pid"]
        source, target = slices[start["pid"], sender], slices[ends[number]["pid"], receiver]
        assert source["ts"] <= start["ts"] <= source["ts"] + source["dur"]
        assert ends[number]["ts"] == target["ts"] >= source["ts"] + source["dur"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"device {d}" for d in range(4)}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in compute} == {e["pid"] for e in waits} == {pid for pid, _ in tracks}
    assert {tracks[e["pid"], e["tid"]] for e in compute} == {"compute"}
    assert {tracks[e["pid"], e["tid"]] for e in waits} == {"wait"}
    # Perfetto keeps threads by number alone: a number used twice, 0, or a process's would put slices on another track
    threads = [tid for _, tid in tracks]
    assert len(set(threads)) == len(threads)
    assert not {0, *(pid for pid, _ in tracks)} & set(threads)


def test_no_event_begins_before_zero(measured):
    """A device may wait for its first input before any pass has begun."""
    early = replace(measured, waits=(((-0.25, 0.0),), *measured.waits[1:]))
    times = {(e["name"], e["pid"]): e["ts"] for e in trace_events(early) if e["ph"] == "X"}
    assert min(times.values()) == times["wait", 1] == 0.0
    usual = {(e["name"], e["pid"]): e["ts"] for e in trace_events(measured) if e["ph"] == "X"}
    assert all(times[key] == pytest.approx(ts + 2.5e5) for key, ts in usual.items() if key[0] != "wait")


def test_slices_of_a_track_follow_each_other_to_the_nanosecond():
    """Perfetto counts in whole nanoseconds and drops a slice that ends after the next one has begun."""
    layers = tuple(LayerCost(f"{i}", 1e-3 / 3, 1e-3 / 7, 1e-3 / 9, 1.0, 0.5) for i in range(8))
    plan = make_plan(CostModel(layers, Link(1e-5 / 3)), 4, 12, "zb-v")
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace_events(planned_timeline(plan)):
        if event["ph"] == "X":
            start, length = 1e3 * event["ts"], 1e3 * event["dur"]
            assert start == pytest.approx(round(start), abs=1e-3)
            tracks.setdefault((event["pid"], event["tid"]), []).append((round(start), round(start) + round(length)))
    assert len(tracks) >= plan.num_devices
    for slices in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(slices)))


def test_all_reports_are_written_and_read_back(plan, measured, tmp_path: Path):
    write_report(tmp_path / "new", plan, report.Observed(step=measured, peak_bytes=plan.predicted.peak_bytes))
    assert read_plan(tmp_path / "new" / "plan.json") == plan
    assert read_costs(tmp_path / "new" / "costs.json") == plan.costs
    for name in ("trace_planned.json", "trace_measured.json"):
        assert json.loads((tmp_path / "new" / name).read_text())["traceEvents"]
    figures = json.loads((tmp_path / "new" / "measured.json").read_text())
    assert (figures["makespan"], figures["busy"]) == (measured.makespan, list(measured.busy))
    assert (figures["peak_bytes"], figures["waits"]) == (list(plan.predicted.peak_bytes), [0.5] * 4)
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "new" / "summary.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 0 |", "| 1 |", "| 2 |", "| 3 |"))]
    busy = [float(row[1]) for row in rows[:4]]
    assert busy == pytest.approx([1e3 * b for b in measured.busy], rel=1e-3)
    assert all(float(row[2]) == 500.0 for row in rows[:4])


def test_the_bubble_of_a_measured_step_is_that_of_its_own_passes(plan, measured):
    """Passes that take longer or shorter than planned are work, not bubbles."""
    planned = planned_timeline(plan)
    assert bubble_rate(plan, planned) == pytest.approx(plan.predicted.bubble_rate)
    slower = replace(planned, starts=measured.starts, ends=measured.ends)
    assert bubble_rate(plan, slower) == pytest.approx(bubble_rate(plan, planned))
    gaps = tuple(tuple(2 * t for t in device) for device in planned.starts)
    ends = tuple(
        tuple(2 * start + end - start for start, end in zip(*device, strict=True))
        for device in zip(planned.starts, planned.ends, strict=True)
    )
    assert bubble_rate(plan, replace(planned, starts=gaps, ends=ends)) > 0.4


def test_the_summary_tells_how_optimizer_steps_ended(plan):
    assert "## Optimizer steps" not in report.summary(plan)
    counters = {"0": {"holds": 1, "redone_forwards": 0}, "1": {"holds": 0, "redone_forwards": 7}}
    text = report.summary(plan, report.Observed(counters=counters))
    assert "| device | holds | redone forwards |\n|---|---|---|\n| 0 | 1 | 0 |\n| 1 | 0 | 7 |" in text
    assert "never of the plan" not in text
    assert "never of the plan" in report.summary(plan, report.Observed(counters={"0": {"switches": 1}}))


def test_a_step_of_devices_that_took_turns_is_no_test_of_the_plan(plan, measured):
    assert "took turns in one process" in report.summary(plan, report.Observed(step=measured, takes_turns=True))
    assert "took turns" not in report.summary(plan, report.Observed(step=measured))
    assert "took turns" not in report.summary(plan, report.Observed(takes_turns=True))


def test_a_plan_alone_can_be_drawn(plan, tmp_path: Path):
    report.svg(plan, tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    report.timeline_picture(make_plan(costs(), 1, 1, "1f1b"), tmp_path / "one.png")
    report.chrome_trace(plan, tmp_path / "trace.json")


def test_the_grid_shows_devices_in_lines_of_one_width(plan):
    lines = report.terminal_grid(plan, width=150).splitlines()
    assert len(lines) == 4
    assert {len(line) for line in lines} == {150}
    assert lines[0].startswith("device 0 F")
    idle = lines[0].count(".") / (150 - len("device 0 "))
    assert idle == pytest.approx(1 - plan.predicted.busy[0] / plan.predicted.makespan, abs=0.05)


def test_matplotlib_is_imported_only_to_draw():
    """Within functions of the report package: nothing else needs it installed."""
    root = Path(report.__file__).parents[1]
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "matplotlib" for name in names):
                assert path.parent.name == "report", path
                assert node.col_offset > 0, path
