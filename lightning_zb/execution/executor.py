"""Walks one device's instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from lightning_zb.execution.data_parallel import GradientReducer
from lightning_zb.execution.optimistic_step import OptimisticStep
from lightning_zb.execution.passes import Passes
from lightning_zb.execution.payload import Packet
from lightning_zb.execution.program import Compute, Instruction, Message, Program, Receive, Send, Validate
from lightning_zb.execution.protocols import ChunkRunner
from lightning_zb.execution.statistics import Recorder, Statistics
from lightning_zb.execution.transport import Transport, TransportError
from lightning_zb.planning.schedule import Pass, PassKind


@dataclass(slots=True)
class Executor:
    """Executes programs on one device; gradients accumulate in the parameters.

    Args:
        device: which device of the pipeline this is.
        runner: runs a chunk forward.
        transport: moves packets between devices.
        recorder: takes the times of passes while profiling.
        optimistic: the optimizer step that may still be pending when the next step begins.
        reducer: averages gradients over replicas; None for one replica.
    """

    device: int
    runner: ChunkRunner
    transport: Transport
    recorder: Recorder | None = None
    optimistic: OptimisticStep | None = None
    reducer: GradientReducer | None = None
    passes: Passes = field(init=False)
    _packets: dict[Message, Packet] = field(init=False, default_factory=dict)
    _results: dict[int, Any] = field(init=False, default_factory=dict)
    _trains: bool = field(init=False, default=False)
    _executed: Counter[PassKind] = field(init=False, default_factory=Counter)
    _last_weights: Mapping[int, Pass] = field(init=False, default_factory=dict)
    _buffers: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.passes = Passes(self.runner)

    @property
    def statistics(self) -> Statistics:
        """What this device did: passes, waits, messages."""
        return self.transport.statistics

    def run(self, program: Program) -> list[Any]:
        """Execute one step.

        Args:
            program: from `lower` for training, from `lower_forward` for evaluation (within the caller's no_grad).

        Returns:
            On the device of the last chunk the losses of all microbatches, detached (outputs where the program is
            forward-only); elsewhere an empty list.
        """
        self.begin(program)
        instructions = program.instructions[self.device]
        position = 0
        while position < len(instructions):
            restarts = self._validate(instructions[position])
            if not restarts:
                try:
                    self.execute(instructions[position])
                except TransportError:
                    raise
                except Exception:  # with weights that will not stand, or with what a restarted peer sends in place of inputs
                    if self.optimistic is None or not self.optimistic.is_pending or not self.optimistic.resolve():
                        raise
                    restarts = True
            position = 0 if restarts else position + 1
            if restarts:
                self._restart(program)
        return self.finish()

    def begin(self, program: Program) -> None:
        """Start a step."""
        self.transport.begin(program, [self.runner.signature(j) for j in range(program.num_microbatches)])
        self.passes.begin(program, self.device)
        self._packets.clear()
        self._results.clear()
        self._executed.clear()
        self._trains = not program.forward_only
        self._last_weights = program.last_weights[self.device]
        if self.optimistic is None:
            return
        if program.forward_only:
            self.optimistic.flush()
            return
        if self.optimistic.settle():
            self.transport.restart()
        self._buffers = [(b, b.clone()) for b in self.optimistic.owner.buffers()] if self.optimistic.is_pending else []

    def _validate(self, instruction: Instruction) -> bool:
        """Look at the verdict on the last optimizer step, before each pass if it is there, at the latest where it must be.

        Returns:
            Whether the step must start again.
        """
        if self.optimistic is None or not self.optimistic.is_pending:
            return False
        due = isinstance(instruction, Validate) or (isinstance(instruction, Compute) and self.optimistic.has_verdict)
        return due and self.optimistic.resolve()

    def _restart(self, program: Program) -> None:
        """Throw away the forwards run with weights that did not stand; peers get and give what they were promised."""
        self.transport.restart()
        if self.optimistic is not None:
            self.optimistic.complete()
        self.passes.begin(program, self.device)
        self._packets.clear()
        for buffer, before in self._buffers:
            buffer.copy_(before)
        self.statistics.redone_forwards += self._executed.total()
        self._executed.clear()

    def ready(self, instruction: Instruction) -> bool:
        """Whether `execute` would not wait."""
        if not isinstance(instruction, Compute) or instruction.needs is None or instruction.source == self.device:
            return True
        return self.transport.ready(instruction.needs)

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction."""
        match instruction:
            case Receive(message, source):
                with nullcontext() if self.recorder is None else self.recorder.transfer():
                    self.transport.post(message, source)
            case Send(message, destination):
                with nullcontext() if self.recorder is None else self.recorder.transfer():
                    self.transport.send(message, destination, self._packets.pop(message))
            case Compute():
                packet = self._take(instruction)
                if self.recorder is not None:
                    self.recorder.start(instruction.run)
                with record_function(str(instruction)) if _profiler_enabled() else nullcontext():
                    given = self._compute(instruction, packet)
                if self.recorder is not None:
                    self.recorder.end(instruction.run)
                self._executed.update(p.kind for p in instruction.covers)
                if self.reducer is not None and instruction.run == self._last_weights.get(instruction.run.chunk):
                    self.reducer.end_chunk(instruction.run.chunk)
                if instruction.gives is not None and given is not None:
                    self._packets[instruction.gives] = given

    def finish(self) -> list[Any]:
        """End the step; the results of the last chunk in the order of microbatches."""
        self.transport.finish()
        self.statistics.passes += self._executed
        self.statistics.steps += self._trains
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
                if self.recorder is not None and self.passes.is_split(chunk, microbatch):
                    self.recorder.begin_weights()
                self.passes.weight(chunk, microbatch)
                return given
        return None
