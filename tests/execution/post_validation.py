"""Training with optimistic steps in real processes, and the same run in one process, for comparison."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zb.execution.host_copy import copy_to_host
from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.optimistic_step import OptimisticStep
from lightning_zb.execution.rollback import Rollback
from lightning_zb.execution.step_mode import ModeSwitch
from lightning_zb.execution.validation import ValidationChain
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, Schedule
from tests.execution.pipeline_models import Model, Runner, SleepingRunner, greedy, make_microbatches
from tests.execution.workers import JitteredRunner, make_executor

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        placement: chunks to devices.
        scales: for each step what losses are multiplied with; decides whether it clips.
        max_norm: what gradients are clipped to.
        counts: microbatches of each step; 6 where it ends.
        schedule: overrides the order of every step.
        optimizer: a key of OPTIMIZERS.
        mode: exact, inplace, auto or off.
        late: the last device to finish sleeps before it does, so that the others are well into their next warm-up.
        jitter: sleep a random while before each forward.
        uneven: shapes differ between microbatches.
        nan: (device, step) pairs whose gradients get a NaN.
        spikes: (device, step) pairs with a gradient that makes the step clip.
        flushes: (device, step) pairs after which the device flushes alone.
        evaluations: steps after which all evaluate.
        defers_norms: norms reach the host late, as from a device that the host runs ahead of.
        options: of the model.
    """

    placement: Placement
    scales: tuple[float, ...]
    max_norm: float = 1.0
    counts: tuple[int, ...] = ()
    schedule: Schedule | None = None
    optimizer: str = "adamw"
    mode: str = "exact"
    late: bool = False
    jitter: bool = False
    uneven: bool = False
    nan: tuple[tuple[int, int], ...] = ()
    spikes: tuple[tuple[int, int], ...] = ()
    flushes: tuple[tuple[int, int], ...] = ()
    evaluations: tuple[int, ...] = ()
    defers_norms: bool = False
    options: dict[str, bool] = field(default_factory=dict)

    def count(self, step: int) -> int:
        return self.counts[step] if step < len(self.counts) else 6


def make_training(case: Case) -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Model(case.placement.num_chunks, counting=True, **case.options)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    optimizer = OPTIMIZERS[case.optimizer](groups)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


class Scaled:
    """Multiplies the loss; mixed into runners."""

    scale = 1.0

    def forward(self, chunk: int, microbatch: int, received: Any) -> Any:
        out = super().forward(chunk, microbatch, received)  # type: ignore[misc]
        return out * self.scale if chunk == self.model.num_chunks - 1 else out  # type: ignore[attr-defined]


class ScaledRunner(Scaled, Runner):
    pass


class ScaledJitteredRunner(Scaled, JitteredRunner):
    pass


@dataclass
class Owner:
    """A `StepOwner` over a plain model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_shared = False

    def share(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()

    def buffers(self) -> list[Tensor]:
        return list(self.model.buffers())

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return False


class SlowCopy:
    """A copy to the host that takes a while, and that the thread of the passes must not wait for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get(self) -> Tensor:
        assert threading.current_thread() is not threading.main_thread(), "the host waits for the device"
        time.sleep(0.03)
        return self._tensor


def disturb(model: Model, case: Case, device: int, step: int) -> None:
    """What the case has in store for the gradients of a device."""
    gradient = model.blocks[case.placement.chunks_of(device)[0]].down.weight.grad
    if (device, step) in case.nan:
        gradient[0, 0] = float("nan")
    if (device, step) in case.spikes:
        gradient[0] += case.max_norm


def state_of(model: Model, optimizer: torch.optim.Optimizer, names: set[str]) -> dict[str, Any]:
    named = {n: p for n, p in model.named_parameters() if n in names}
    return {
        "weights": {n: p.detach().clone() for n, p in named.items()},
        "state": {n: copy.deepcopy(optimizer.state.get(p, {})) for n, p in named.items()},
        "calls": {n: b.clone() for n, b in model.named_buffers()},
        "lr": [g["lr"] for g in optimizer.param_groups],
    }


def train_pipeline(rank: int, case: Case) -> dict[str, Any]:
    """This rank's final weights and optimizer state, losses, evaluations, counters."""
    placement = case.placement
    model, optimizer, scheduler = make_training(case)
    executor = make_executor(rank, None, placement)
    switch = {"off": ModeSwitch.never, "auto": ModeSwitch.auto}.get(case.mode, ModeSwitch.always)()
    rollback = Rollback.INPLACE if case.mode == "inplace" else Rollback.EXACT
    chain = ValidationChain(executor.transport.channels)
    step_end = OptimisticStep(
        Owner(model, optimizer),
        chain,
        executor.statistics,
        rollback,
        switch,
        copy=SlowCopy if case.defers_norms else copy_to_host,
        waits_for_norms=not case.defers_norms,
    )
    executor.optimistic = step_end
    kind = ScaledJitteredRunner if case.jitter else ScaledRunner
    losses, outputs, names = [], [], set()
    for step, scale in enumerate(case.scales):
        count = case.count(step)
        runner = kind(model, make_microbatches(count, case.uneven, seed=step), placement, rank)
        runner.scale = scale
        executor.runner = executor.passes.runner = runner
        schedule = case.schedule or greedy(placement, count)
        program = lower(schedule, placement)
        losses.append(executor.run(program))
        disturb(model, case, rank, step)
        if case.late and rank == program.finishing_order[-1]:
            time.sleep(0.05)
        names |= {n for n, p in model.named_parameters() if p.grad is not None}
        step_end.clip(case.max_norm)
        step_end.finish(program.finishing_order)
        optimizer.zero_grad()
        scheduler.step()
        if (rank, step) in case.flushes:
            step_end.flush()
        if step in case.evaluations:
            with torch.no_grad():
                outputs.append(executor.run(lower_forward(placement, count)))
    step_end.close()
    executor.transport.close()
    return {
        **state_of(model, optimizer, names),
        "losses": losses,
        "outputs": outputs,
        "statistics": executor.statistics.as_dict(),
    }


def train_alone(case: Case) -> dict[str, Any]:
    """The same run in one process with clip_grad_norm_; steps with a norm that is not finite are skipped."""
    model, optimizer, scheduler = make_training(case)
    losses, outputs = [], []
    for step, scale in enumerate(case.scales):
        microbatches = make_microbatches(case.count(step), case.uneven, seed=step)
        losses.append([])
        for ids in microbatches:
            loss = run_all(model, ids) / len(microbatches) * scale
            loss.backward()
            losses[-1].append(loss.detach())
        for device in range(case.placement.num_devices):
            disturb(model, case, device, step)
        norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], case.max_norm)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step in case.evaluations:
            with torch.no_grad():
                outputs.append([run_all(model, ids) / len(microbatches) * scale for ids in microbatches])
    names = {n for n, _ in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    return {**state_of(model, optimizer, names), "trained": trained, "losses": losses, "outputs": outputs}


def run_all(model: Model, ids: Tensor) -> Tensor:
    received = None
    for chunk in range(model.num_chunks):
        received = model.run_chunk(chunk, received, ids)
    return received


class Starts:
    """A recorder of when passes start."""

    def __init__(self) -> None:
        self.step = 0
        self.starts: dict[tuple[int, Pass], float] = {}

    def wait(self, p: Pass) -> None:
        pass

    def transfer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_weights(self) -> None:
        pass

    def start(self, p: Pass) -> None:
        self.starts[self.step, p] = time.perf_counter()

    def end(self, p: Pass) -> None:
        pass


def sleep_with_steps(
    rank: int,
    schedule: Schedule,
    placement: Placement,
    seconds: dict[str, float],
    mode: str,
    clips: tuple[bool, ...],
    late_seconds: tuple[tuple[int, int, float], ...] = (),
) -> dict[str, Any]:
    """Start times of steps of emulated layers; `clips` says which steps clip, known to the last finisher only."""
    runner = SleepingRunner(seconds, placement.num_chunks)
    own = [runner.weights[c] for c in placement.chunks_of(rank)]
    optimizer = torch.optim.AdamW(runner.weights, lr=0.0)
    executor = make_executor(rank, runner, placement)
    switch = ModeSwitch.never() if mode == "off" else ModeSwitch.always()
    model = nn.Module()
    step_end = OptimisticStep(
        Owner(model, optimizer), ValidationChain(executor.transport.channels), executor.statistics, Rollback.EXACT, switch
    )
    executor.optimistic = step_end
    program = lower(schedule, placement)
    executor.recorder = recorder = Starts()
    torch.distributed.barrier()
    starts, ends = [], []
    for step, clip in enumerate(clips):
        for device, at, delay in late_seconds:
            if (device, at) == (rank, step):
                time.sleep(delay)
        starts.append(time.perf_counter())
        recorder.step = step
        executor.run(program)
        if clip and rank == program.finishing_order[-1]:
            own[0].grad = torch.full_like(own[0], 1e9)
        step_end.clip(1e6)
        step_end.finish(program.finishing_order)
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    step_end.close()
    executor.transport.close()
    return {"starts": starts, "ends": ends, "passes": recorder.starts, "statistics": executor.statistics.as_dict()}
