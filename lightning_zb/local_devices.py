"""The devices of a pipeline that one process stands for: what runs their chunks, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_zb.execution.channels import Channels
from lightning_zb.execution.executor import Executor
from lightning_zb.execution.offline import offline_executors, run_offline
from lightning_zb.execution.profiler import StepRecorder
from lightning_zb.execution.program import Program
from lightning_zb.execution.statistics import Statistics
from lightning_zb.execution.transport import DistributedTransport
from lightning_zb.model.layer_recorder import LayerRecorder
from lightning_zb.model.runner import StepRunner


class LocalDevices:
    """Runners and executors of one assignment of chunks: one device of many, or all devices in turns.

    Args:
        devices: which devices of the pipeline they are.
        runners: for each of them what runs its chunks.
        channels: to the processes of the other devices; None where all devices are here.
    """

    def __init__(self, devices: Sequence[int], runners: Sequence[StepRunner], channels: Channels | None) -> None:
        self.runners = tuple(runners)
        self._takes_turns = channels is None
        if channels is None:
            self.executors = offline_executors(self.runners)
        else:
            self.executors = [Executor(devices[0], self.runners[0], DistributedTransport(channels))]

    def run(self, program: Program) -> None:
        """Execute one step of these devices, once their runners have begun it."""
        if self._takes_turns:
            run_offline(program, self.executors)
        else:
            self.executors[0].run(program)

    def output(self, microbatch: int) -> Any:
        """What the user's step returned for a microbatch, detached; None where the last chunk runs elsewhere."""
        found = [runner.outputs[microbatch] for runner in self.runners if microbatch in runner.outputs]
        return found[0] if found else None

    def record(self, recorders: Sequence[StepRecorder] | None, runs_whole: bool | None) -> None:
        """Let the coming steps be recorded, or no longer.

        Args:
            recorders: one for each device; None to stop.
            runs_whole: whether each backward runs whole, or split; None: as the plan says.
        """
        found: Sequence[StepRecorder | None] = [None] * len(self.executors) if recorders is None else recorders
        for executor, runner, recorder in zip(self.executors, self.runners, found, strict=True):
            of_layers = recorder if isinstance(recorder, LayerRecorder) else None
            executor.recorder, runner.recorder = recorder, of_layers
            executor.passes.profiled_weights = None if of_layers is None else of_layers.new_weights
            executor.passes.runs_whole = runs_whole

    @property
    def is_recorded(self) -> bool:
        """Whether the coming step is."""
        return self.executors[0].recorder is not None

    @property
    def waiting_gradients(self) -> dict[nn.Parameter, int]:
        """For each parameter that other devices use too how many gradients of single microbatches wait here in a step."""
        return {p: len(parts) for e in self.executors for p, parts in e.passes.tied_parts.items()}

    @property
    def statistics(self) -> Statistics:
        """What these devices did together."""
        total = self.executors[0].statistics
        for executor in self.executors[1:]:
            total = total + executor.statistics
        return total

    def close(self) -> None:
        """End what connects these devices with others."""
        for executor in self.executors:
            executor.transport.close()
