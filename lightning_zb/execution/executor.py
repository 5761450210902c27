"""Walks one device's instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch.profiler import record_function

from lightning_zb.execution.passes import Passes
from lightning_zb.execution.payload import Packet
from lightning_zb.execution.program import Compute, Instruction, Message, Program, Receive, Send
from lightning_zb.execution.protocols import ChunkRunner
from lightning_zb.execution.statistics import Recorder, Statistics
from lightning_zb.execution.transport import Transport
from lightning_zb.planning.schedule import PassKind


@dataclass(slots=True)
class Executor:
    """Executes programs on one device; gradients accumulate in the parameters.

    Args:
        device: which device of the pipeline this is.
        runner: runs a chunk forward.
        transport: moves packets between devices.
        statistics: what is counted.
        recorder: takes the times of passes while profiling.
    """

    device: int
    runner: ChunkRunner
    transport: Transport
    statistics: Statistics = field(default_factory=Statistics)
    recorder: Recorder | None = None
    passes: Passes = field(init=False)
    _packets: dict[Message, Packet] = field(init=False, default_factory=dict)
    _results: dict[int, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.passes = Passes(self.runner)

    def run(self, program: Program) -> list[Any]:
        """Execute one step.

        Args:
            program: from `lower` for training, from `lower_forward` for evaluation (within the caller's no_grad).

        Returns:
            On the device of the last chunk the losses of all microbatches, detached (outputs where the program is
            forward-only); elsewhere an empty list.
        """
        self.begin(program)
        for instruction in program.instructions[self.device]:
            self.execute(instruction)
        return self.finish()

    def begin(self, program: Program) -> None:
        """Start a step."""
        self.transport.begin(program, [self.runner.signature(j) for j in range(program.num_microbatches)])
        self.passes.begin(program, self.device)
        self._packets.clear()
        self._results.clear()

    def ready(self, instruction: Instruction) -> bool:
        """Whether `execute` would not wait."""
        if not isinstance(instruction, Compute) or instruction.needs is None or instruction.source == self.device:
            return True
        return self.transport.ready(instruction.needs)

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction."""
        match instruction:
            case Receive(message, source):
                self.transport.post(message, source)
            case Send(message, destination):
                self.transport.send(message, destination, self._packets.pop(message))
            case Compute():
                packet = self._take(instruction)
                if self.recorder is not None:
                    self.recorder.start(instruction.run)
                with record_function(str(instruction)):
                    given = self._compute(instruction, packet)
                if self.recorder is not None:
                    self.recorder.end(instruction.run)
                self.statistics.passes.update(p.kind for p in instruction.covers)
                if instruction.gives is not None and given is not None:
                    self._packets[instruction.gives] = given

    def finish(self) -> list[Any]:
        """End the step; the results of the last chunk in the order of microbatches."""
        self.transport.finish()
        self.statistics.steps += 1
        return [self._results[j] for j in sorted(self._results)]

    def _take(self, compute: Compute) -> Packet | None:
        """What the pass needs: handed over on this device, or received."""
        if compute.needs is None:
            return None
        if compute.source == self.device:
            return self._packets.pop(compute.needs)
        if self.recorder is not None:
            self.recorder.wait(compute.run)
        start = perf_counter()
        packet = self.transport.take(compute.needs, compute.source)
        self.statistics.wait_seconds += perf_counter() - start
        if compute.needs.kind is PassKind.BACKWARD_INPUT:  # the gradient of what F sent: that send is over
            self.transport.arrived(Message(PassKind.FORWARD, compute.run.chunk + 1, compute.run.microbatch))
        return packet

    def _compute(self, compute: Compute, packet: Packet | None) -> Packet | None:
        chunk, microbatch = compute.run.chunk, compute.run.microbatch
        match compute.run.kind:
            case PassKind.FORWARD:
                given, result = self.passes.forward(chunk, microbatch, packet)
                if given is None:
                    self._results[microbatch] = result
                return given
            case PassKind.BACKWARD_INPUT:
                return self.passes.backward(chunk, microbatch, packet)
            case PassKind.BACKWARD_WEIGHT:
                self.passes.weight(chunk, microbatch)
            case PassKind.BACKWARD:
                given = self.passes.backward(chunk, microbatch, packet)
                self.passes.weight(chunk, microbatch)
                return given
        return None
