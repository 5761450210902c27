"""What a device executes in a step: compute, send, post a receive, validate. Data only; `lowering.lower` makes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind


@dataclass(frozen=True, slots=True)
class Message:
    """What one pass hands to the next, named after the pass that takes it: `F2.5` is the activation chunk 2 reads.

    Args:
        kind: FORWARD for an activation, BACKWARD_INPUT for the gradient that comes back.
        chunk: the chunk that takes it.
        microbatch: its microbatch.
    """

    kind: PassKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a pass.

    Args:
        run: the pass.
        covers: the passes of the schedule it stands for (B and W where lowering made one BW of them).
        needs: what it takes, and from which device.
        gives: what it hands over.
    """

    run: Pass
    covers: tuple[Pass, ...]
    needs: Message | None
    source: int
    gives: Message | None

    def __str__(self) -> str:
        return str(self.run)


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending a message to another device."""

    message: Message
    destination: int

    def __str__(self) -> str:
        return f"send {self.message} to {self.destination}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Allocate for a message and post its receive; the pass that needs it waits for it."""

    message: Message
    source: int

    def __str__(self) -> str:
        return f"receive {self.message} from {self.source}"


@dataclass(frozen=True, slots=True)
class Validate:
    """Wait for the outcome of the previous optimizer step; nothing before this line depends on it for good."""

    def __str__(self) -> str:
        return "validate"


Instruction = Compute | Send | Receive | Validate


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of all devices for one step.

    Args:
        placement: chunks to devices.
        num_microbatches: microbatches of the step.
        forward_only: an evaluation program; its last chunk yields an output, not a loss.
        instructions: for each device what it executes, in order.
        sequences: for each ordered pair (source, destination) that communicates, its messages in order.
        committed: for each such pair how many of them the source sends before its validation point.
        finishing_order: devices by the simulated end of their last pass.
        fused: for each device the (chunk, microbatch) whose backward runs as one BW: their forward has nothing to defer.
        last_weights: for each device and each of its chunks the pass after which the chunk's gradients are complete.
    """

    placement: Placement
    num_microbatches: int
    forward_only: bool
    instructions: tuple[tuple[Instruction, ...], ...]
    sequences: dict[tuple[int, int], tuple[Message, ...]]
    committed: dict[tuple[int, int], int]
    finishing_order: tuple[int, ...]
    fused: tuple[frozenset[tuple[int, int]], ...] = field(init=False, compare=False)
    last_weights: tuple[dict[int, Pass], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        runs = [[i.run for i in instructions if isinstance(i, Compute)] for instructions in self.instructions]
        fused = tuple(frozenset((p.chunk, p.microbatch) for p in own if p.kind is PassKind.BACKWARD) for own in runs)
        with_weights = (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT)
        last_weights = tuple({p.chunk: p for p in own if p.kind in with_weights} for own in runs)
        object.__setattr__(self, "fused", fused)
        object.__setattr__(self, "last_weights", last_weights)

    @property
    def num_devices(self) -> int:
        return self.placement.num_devices

    def count(self, device: int) -> Counter[PassKind]:
        """Passes of the schedule on a device, by kind."""
        computes = (i for i in self.instructions[device] if isinstance(i, Compute))
        return Counter(p.kind for compute in computes for p in compute.covers)

    def receive_window(self, source: int, destination: int) -> int:
        """The most messages of a pair that are posted and not yet taken at any time: buffers to allow for."""
        window = most = 0
        for instruction in self.instructions[destination]:
            if isinstance(instruction, Receive) and instruction.source == source:
                window += 1
                most = max(most, window)
            elif isinstance(instruction, Compute) and instruction.needs and instruction.source == source:
                window -= 1
        return most

    def text(self, device: int) -> str:
        """The instructions of a device, one a line."""
        return "\n".join(map(str, self.instructions[device]))

    def check(self) -> None:
        """Prove that no two devices can wait for each other.

        Raises:
            ValueError: a pair's sends and receives differ in order, or a cycle of waits exists; it prints which.
        """
        _check_pairs(self)
        _check_progress(self)


def _check_pairs(program: Program) -> None:
    for (source, destination), _ in program.sequences.items():
        sent = [i.message for i in program.instructions[source] if isinstance(i, Send) and i.destination == destination]
        posted = [i.message for i in program.instructions[destination] if isinstance(i, Receive) and i.source == source]
        for n, (a, b) in enumerate(zip(sent, posted, strict=False)):
            if a != b:
                raise ValueError(f"transfer {n} from device {source} to {destination} is sent as {a} and received as {b}")
        if len(sent) != len(posted):
            raise ValueError(
                f"device {source} sends {len(sent)} messages to device {destination}, which receives {len(posted)}"
            )


def _check_progress(program: Program) -> None:
    """Run all devices together; a receive completes once it and everything before it in its pair was sent."""
    sent: set[Message] = set()
    posted: set[Message] = set()
    position = [0] * program.num_devices
    moved = True
    while moved:
        moved = False
        for device, instructions in enumerate(program.instructions):
            while position[device] < len(instructions):
                instruction = instructions[position[device]]
                if isinstance(instruction, Compute):
                    needs = instruction.needs
                    if needs is not None and (needs not in sent or (instruction.source != device and needs not in posted)):
                        break
                    if instruction.gives is not None and program.placement.devices[instruction.gives.chunk] == device:
                        sent.add(instruction.gives)
                elif isinstance(instruction, Send):
                    sent.add(instruction.message)
                elif isinstance(instruction, Receive):
                    posted.add(instruction.message)
                position[device] += 1
                moved = True
    waits = {d: ins[position[d]] for d, ins in enumerate(program.instructions) if position[d] < len(ins)}
    if waits:
        raise ValueError(f"the program deadlocks: {_cycle(waits)}")


def _cycle(waits: dict[int, Instruction]) -> str:
    """Follow who waits for whom until a device repeats."""
    device = next(iter(waits))
    seen: list[int] = []
    while device in waits and device not in seen:
        seen.append(device)
        device = getattr(waits[device], "source", device)
    cycle = seen[seen.index(device) :] if device in seen else seen
    parts = (
        f"device {d} at {waits[d]} waits for {getattr(waits[d], 'needs', None)} from device {getattr(waits[d], 'source', d)}"
        for d in cycle
    )
    return ", ".join(parts)
