"""What the processes of the distributed tests run."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import torch

from lightning_zb.execution.channels import open_channels
from lightning_zb.execution.executor import Executor
from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.transport import DistributedTransport
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Schedule
from tests.execution.pipeline_models import Model, Runner, SleepingRunner, make_microbatches


class JitteredRunner(Runner):
    """Sleeps a random while before each forward."""

    def forward(self, chunk: int, microbatch: int, received: Any) -> Any:
        time.sleep(random.random() * 0.02)
        return super().forward(chunk, microbatch, received)


def make_executor(rank: int, runner: Any, placement: Placement, timeout: float = 30) -> Executor:
    channels = open_channels(placement, [list(range(placement.num_devices))], torch.device("cpu"), timedelta(seconds=timeout))
    return Executor(rank, runner, DistributedTransport(channels))


def train(
    rank: int, schedules: list[Schedule], placement: Placement, uneven: bool, jitter: bool, options: dict[str, bool]
) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]]:
    """Run steps of these schedules; losses, gradients and evaluation outputs of each."""
    torch.manual_seed(0)
    model = Model(placement.num_chunks, **options)
    executor = make_executor(rank, None, placement)
    out = []
    for step, schedule in enumerate(schedules):
        microbatches = make_microbatches(schedule.num_microbatches, uneven, seed=step)
        runner = (JitteredRunner if jitter else Runner)(model, microbatches, placement, rank)
        executor.runner = executor.passes.runner = runner
        model.zero_grad()
        losses = executor.run(lower(schedule, placement))
        with torch.no_grad():
            outputs = executor.run(lower_forward(placement, schedule.num_microbatches))
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        out.append((losses, gradients, outputs))
    assert executor.passes.num_live == 0
    executor.transport.close()
    return out


def sleep_steps(
    rank: int, schedule: Schedule, placement: Placement, seconds: dict[str, float], steps: int
) -> tuple[list[float], dict[str, Any]]:
    """Wall seconds of each step, all devices starting together."""
    executor = make_executor(rank, SleepingRunner(seconds, placement.num_chunks), placement)
    program = lower(schedule, placement)
    times = []
    for _ in range(steps):
        torch.distributed.barrier()
        start = time.perf_counter()
        executor.run(program)
        torch.distributed.barrier()
        times.append(time.perf_counter() - start)
    return times, executor.statistics.as_dict()


def die(rank: int, schedule: Schedule, placement: Placement, how: str) -> None:
    """Device 1 ends, raises, stalls or changes its shapes in the middle of a step."""
    torch.manual_seed(0)
    model = Model(placement.num_chunks)
    microbatches = make_microbatches(schedule.num_microbatches)
    runner = FailingRunner(model, microbatches, placement, rank)
    runner.how = how if rank == 1 else ""
    make_executor(rank, runner, placement, timeout=3).run(lower(schedule, placement))


class FailingRunner(Runner):
    """Fails in its fifth forward."""

    how = ""
    calls = 0

    def forward(self, chunk: int, microbatch: int, received: Any) -> Any:
        self.calls += 1
        if self.calls == 5:
            if self.how == "exit":
                import os

                os._exit(1)
            if self.how == "raise":
                raise ValueError("boom")
            if self.how == "stall":
                time.sleep(7)
            if self.how == "shape":
                return super().forward(chunk, microbatch, received)[:, :2]
        return super().forward(chunk, microbatch, received)
