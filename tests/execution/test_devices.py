"""What devices tell of themselves: workspace from the allocator, speed beside each other. CUDA is stood in for."""

from __future__ import annotations

import pytest
import torch

from lightning_zb.execution import profiler
from lightning_zb.execution.profiler import CudaClock, HostClock, clock_of
from lightning_zb.execution.speed import reference_seconds, relative_speeds
from lightning_zb.execution.workspace import Workspace, workspace_of


class Allocator:
    """`torch.cuda`'s figures of memory."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))


def test_workspace_is_what_neither_end_of_a_pass_has(monkeypatch: pytest.MonkeyPatch):
    allocator, meter = Allocator(), Workspace(torch.device("cuda"))
    allocator.patch(monkeypatch)
    allocator.allocate(1000)

    def run(part: tuple[int, str], *sizes: int) -> None:
        meter.begin()
        for size in sizes:
            allocator.allocate(size)
        meter.end(part)

    run((0, "F"), 300, 50, -50)  # keeps 300, and needs 50 beside them for a moment
    run((1, "F"), 10)
    run((0, "B"), 70, -300, -70, 20)  # 70 beside the 300 that it frees
    run((0, "F"), 300, 80, -80)
    assert meter.bytes == {(0, "F"): 80, (1, "F"): 0, (0, "B"): 70}
    assert meter.of_chunk(0) == {"F": 80, "B": 70}


def test_a_cpu_tells_nothing_of_workspace():
    assert workspace_of(torch.device("cpu")) is None
    assert isinstance(workspace_of(torch.device("cuda")), Workspace)


def test_speeds_are_relative_and_only_told_where_they_differ():
    assert relative_speeds([1.0, 1.1, 1.15]) is None
    assert relative_speeds([1.0, 2.0, 2.0]) == pytest.approx((1.5, 0.75, 0.75))
    assert relative_speeds([0.0, 1.0]) is None
    assert 0 < reference_seconds(torch.device("cpu"), HostClock()) < 10


def test_events_tell_seconds_from_one_zero_and_are_synchronised_once(monkeypatch: pytest.MonkeyPatch):
    """`elapsed_time` is in milliseconds; nothing may wait before the seconds are asked for."""
    log: list[str] = []

    class Event:
        moment = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            Event.moment += 250.0
            self.at = Event.moment
            log.append("record")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(profiler, "perf_counter", lambda: 100.0)
    clock = clock_of(torch.device("cuda:1"))
    assert isinstance(clock, CudaClock)
    marks = [clock.mark() for _ in range(3)]
    assert log == ["synchronize", "record", "record", "record", "record"]
    assert clock.seconds(marks) == [100.25, 100.5, 100.75]
    assert log.count("synchronize") == 2
