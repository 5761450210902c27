"""What runs where and in which order: passes and the schedule that orders them.

A pass is an identity (kind, chunk, microbatch) and nothing else; its times live in a `Timeline`, its bytes in the
cost model. A schedule is, for each device, the ordered tuple of its passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, unique

from lightning_zb.planning.placement import Placement


@unique
class PassKind(str, Enum):
    """What a pass computes for one microbatch on one chunk."""

    FORWARD = "F"
    BACKWARD_INPUT = "B"
    BACKWARD_WEIGHT = "W"
    BACKWARD = "BW"

    @property
    def sends_gradient(self) -> bool:
        """True where the pass yields the gradient of the chunk's input (B and BW)."""
        return self in (PassKind.BACKWARD_INPUT, PassKind.BACKWARD)


_PASS = re.compile(r"(BW|F|B|W)(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """One pass: `F2.5` is the forward of chunk 2 on microbatch 5, both counted from 0."""

    kind: PassKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read the form that `str` writes.

        Raises:
            ValueError: the text is not a pass.
        """
        match = _PASS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a pass; write for example F0.3, B2.1, W2.1 or BW1.0 (kind, chunk, microbatch)")
        return cls(PassKind(match[1]), int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of passes on every device.

    Args:
        orders: for each device the passes it runs, first to last. A chunk's microbatch appears as F, then either
            B and W or one BW.
    """

    orders: tuple[tuple[Pass, ...], ...]

    @property
    def num_devices(self) -> int:
        return len(self.orders)

    @property
    def num_microbatches(self) -> int:
        return 1 + max((p.microbatch for p in self.passes()), default=-1)

    @property
    def num_chunks(self) -> int:
        return 1 + max((p.chunk for p in self.passes()), default=-1)

    def passes(self) -> Iterator[Pass]:
        """All passes, device by device."""
        for order in self.orders:
            yield from order

    def check(self, placement: Placement) -> None:
        """Verify that this is a complete, runnable order for the placement.

        Each pass stands once and on the chunk's device, B and W (or BW) follow their F, microbatches of one kind and
        chunk ascend (this fixes the bits of gradient accumulation), and no cycle of waits exists between devices.

        Raises:
            ValueError: the first rule that is broken, naming device and pass.
        """
        if self.num_devices != placement.num_devices or self.num_chunks != placement.num_chunks:
            raise ValueError(
                f"the schedule has {self.num_devices} devices and {self.num_chunks} chunks, "
                f"the placement {placement.num_devices} and {placement.num_chunks}"
            )
        _check_complete(self, placement)
        _check_runnable(self)

    def fused(self) -> Schedule:
        """The same order with each B directly followed by its own W written as one BW."""
        return Schedule(tuple(tuple(_fuse(order)) for order in self.orders))

    def first_microbatches(self, num_microbatches: int) -> Schedule:
        """The same order without the later microbatches; dependencies and memory can only ease."""
        return Schedule(tuple(tuple(p for p in order if p.microbatch < num_microbatches) for order in self.orders))

    @classmethod
    def parse(cls, orders: Iterable[Iterable[str]]) -> Schedule:
        """Read a schedule from pass names, one list for each device."""
        return cls(tuple(tuple(Pass.parse(name) for name in order) for order in orders))


def _fuse(order: tuple[Pass, ...]) -> Iterator[Pass]:
    index = 0
    while index < len(order):
        here = order[index]
        following = order[index + 1] if index + 1 < len(order) else None
        if here.kind is PassKind.BACKWARD_INPUT and following == Pass(PassKind.BACKWARD_WEIGHT, here.chunk, here.microbatch):
            yield Pass(PassKind.BACKWARD, here.chunk, here.microbatch)
            index += 2
        else:
            yield here
            index += 1


def _check_complete(schedule: Schedule, placement: Placement) -> None:
    num_microbatches = schedule.num_microbatches
    seen: set[Pass] = set()
    for device, order in enumerate(schedule.orders):
        last: dict[tuple[str, int], int] = {}
        for p in order:
            if placement.devices[p.chunk] != device:
                raise ValueError(
                    f"{p} stands on device {device}, but chunk {p.chunk} is placed on {placement.devices[p.chunk]}"
                )
            if p in seen:
                raise ValueError(f"{p} stands twice")
            seen.add(p)
            for stream in p.kind.value:  # BW counts in both the B and the W stream
                if last.get((stream, p.chunk), -1) != p.microbatch - 1:
                    raise ValueError(
                        f"{p} on device {device} is out of turn: microbatches of {stream}{p.chunk} must ascend from 0"
                    )
                last[stream, p.chunk] = p.microbatch
            if p.kind.sends_gradient and last.get(("F", p.chunk), -1) < p.microbatch:
                raise ValueError(f"{p} on device {device} stands before its forward")
            if p.kind is PassKind.BACKWARD_WEIGHT and last.get(("B", p.chunk), -1) < p.microbatch:
                raise ValueError(f"{p} on device {device} stands before its input gradient")
        for chunk in placement.chunks_of(device):
            for stream in "FBW":
                if last.get((stream, chunk), -1) != num_microbatches - 1:
                    raise ValueError(f"device {device} lacks {stream}{chunk} for some of the {num_microbatches} microbatches")


def _check_runnable(schedule: Schedule) -> None:
    """Run all devices together in any order that waits allow; what remains is a cycle."""
    done: set[tuple[str, int, int]] = set()
    position = [0] * schedule.num_devices
    last_chunk = schedule.num_chunks - 1
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            while position[device] < len(order):
                p = order[position[device]]
                if p.kind is PassKind.FORWARD:
                    ready = p.chunk == 0 or ("F", p.chunk - 1, p.microbatch) in done
                elif p.kind is PassKind.BACKWARD_WEIGHT:
                    ready = True
                else:
                    ready = p.chunk == last_chunk or ("B", p.chunk + 1, p.microbatch) in done
                if not ready:
                    break
                for stream in p.kind.value:
                    done.add((stream, p.chunk, p.microbatch))
                position[device] += 1
                moved = True
    stuck = [f"device {d} at {order[position[d]]}" for d, order in enumerate(schedule.orders) if position[d] < len(order)]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
