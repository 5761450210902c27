"""Times of passes, and of the layers within them, taken while a step runs; nothing is synchronised until they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from lightning_zb.planning.schedule import Pass, PassKind
from lightning_zb.planning.timeline import Timeline

Mark = Any
"""A moment that a clock has noted; its seconds may be known only later."""


class Clock(Protocol):
    """Notes moments, and tells their seconds afterwards."""

    def mark(self) -> Mark:
        """Note this moment."""
        ...

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds of the moments from any common zero of this host; may wait for the device."""
        ...


class HostClock:
    """`perf_counter`, for devices that run a pass before the host goes on."""

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class CudaClock:
    """Events on the current stream: what the device did, however far the host is ahead.

    Args:
        device: whose streams are timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero_seconds = perf_counter()
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [self._zero_seconds + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock for a device's work."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


Segment = tuple[str, int, Mark, Mark]
"""A part of a pass: "F", "B" or "W", the item (prologue, layer, epilogue) it belongs to, its start and end."""


@dataclass(slots=True)
class PassMarks:
    """Moments of one pass.

    Args:
        start: the pass starts.
        wait: the device began to wait for the pass's input; None where it needed none from another device.
        end: the pass ended.
        transfers: start and end of each handing over, or posting of a receive, that followed.
        weights: where B ends and W begins, in a pass that runs both.
        segments: what its layers took.
    """

    start: Mark
    wait: Mark | None = None
    end: Mark = None
    weights: Mark | None = None
    transfers: list[tuple[Mark, Mark]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


class StepRecorder:
    """Takes the times of one device's passes in one step; implements `lightning_zb.execution.statistics.Recorder`.

    A pass that runs again (after a restart of the step) counts as it ran last.

    Args:
        clock: notes moments.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: dict[Pass, PassMarks] = {}
        self._waiting: Mark | None = None
        self._running: PassMarks | None = None
        self._ended: PassMarks | None = None

    def wait(self, p: Pass) -> None:
        """The device starts to wait for what the pass needs."""
        self._waiting = self.clock.mark()

    def start(self, p: Pass) -> None:
        """The pass starts."""
        self.marks.pop(p, None)
        self._running = self.marks[p] = PassMarks(self.clock.mark(), self._waiting)
        self._waiting = None

    def end(self, p: Pass) -> None:
        """The pass ended."""
        self._ended = self.marks[p]
        self._ended.end = self.clock.mark()
        self._running = None

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Around work for messages, which counts as part of the pass before it."""
        start = self.clock.mark()
        yield
        if self._ended is not None:
            self._ended.transfers.append((start, self.clock.mark()))

    def begin_weights(self) -> None:
        """The running pass starts its W."""
        if self._running is not None:
            self._running.weights = self.clock.mark()

    def segment(self, part: str, item: int, start: Mark, end: Mark) -> None:
        """An item's part of the running pass."""
        if self._running is not None:
            self._running.segments.append((part, item, start, end))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one pass, from a common zero of the host.

    Args:
        run: the pass.
        start: its start.
        end: its end.
        wait: when the device began to wait for its input, None where it did not.
        parts: seconds of F, B and W in it, or of BW where B and W ran as one; with the handing over after it.
        items: seconds of F, B and W of each item in it, by (part, item).
    """

    run: Pass
    start: float
    end: float
    wait: float | None
    parts: dict[str, float]
    items: dict[tuple[str, int], float]


def read_times(recorder: StepRecorder) -> tuple[PassTimes, ...]:
    """The seconds of a recorded step, in the order the passes ran; may wait for the device, so not within a step."""
    complete = [(p, m) for p, m in recorder.marks.items() if m.end is not None]
    flat: list[Mark] = []
    for _, m in complete:
        flat += [m.start, m.end, m.start if m.wait is None else m.wait, m.end if m.weights is None else m.weights]
        flat += [mark for *_, start, end in (*m.transfers, *m.segments) for mark in (start, end)]
    seconds = iter(recorder.clock.seconds(flat))
    return tuple(_read_pass(p, m, seconds) for p, m in complete)


def _read_pass(p: Pass, marks: PassMarks, seconds: Any) -> PassTimes:
    start, end, wait, weights = next(seconds), next(seconds), next(seconds), next(seconds)
    transfer = 0.0
    for _ in marks.transfers:
        began = next(seconds)
        transfer += next(seconds) - began
    items: dict[tuple[str, int], float] = {}
    for part, item, *_ in marks.segments:
        began = next(seconds)
        items[part, item] = items.get((part, item), 0.0) + next(seconds) - began
    parts = {p.kind.value: end - start + transfer}
    if p.kind is PassKind.BACKWARD and marks.weights is not None:
        parts = {"B": weights - start, "W": end - weights + transfer}
    return PassTimes(p, start, end, None if marks.wait is None else wait, parts, items)


def joined_timeline(devices: Sequence[Iterable[PassTimes]], offsets: Sequence[float] | None = None) -> Timeline:
    """The measured timeline of a step over all devices, from the start of its first pass.

    Args:
        devices: for each device its passes.
        offsets: for each device what its host's clock is ahead of the first device's.
    """
    ahead = [0.0] * len(devices) if offsets is None else list(offsets)
    passes = [sorted(times, key=lambda t: t.start) for times in devices]
    zero = min((t.start - ahead[d] for d, times in enumerate(passes) for t in times), default=0.0)
    shift = [ahead[d] + zero for d in range(len(passes))]
    return Timeline(
        orders=tuple(tuple(t.run for t in times) for times in passes),
        starts=tuple(tuple(t.start - shift[d] for t in times) for d, times in enumerate(passes)),
        ends=tuple(tuple(t.end - shift[d] for t in times) for d, times in enumerate(passes)),
        waits=tuple(
            tuple((t.wait - shift[d], t.start - shift[d]) for t in times if t.wait is not None)
            for d, times in enumerate(passes)
        ),
    )
