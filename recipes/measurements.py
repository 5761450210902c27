"""A callback that times optimizer steps, and what each device waits and holds."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import distributed

from lightning_zb import ZeroBubbleCallback


class Measurements(L.Callback):
    """Times every optimizer step, logs tokens per second, and gathers the devices' values at the end of training.

    Steps are timed from the end of one to the end of the next, data and Lightning's own work included, validation not.

    Args:
        num_warmup_steps: first steps that the results leave out, and first ones of another plan: allocators and caches are
            still filling. Steps that the pipeline's profiler measures, or plans beside, are left out too, as are those of
            earlier plans.
    """

    def __init__(self, num_warmup_steps: int = 3) -> None:
        self.num_warmup_steps = num_warmup_steps
        self.peak_memory: tuple[int, ...] = ()
        """Bytes of each device's process while it trained: allocated by torch on a GPU, resident on a CPU."""
        self.wait_shares: tuple[float, ...] = ()
        """For each device the share of the steps' time that its host waited for messages; empty without a pipeline."""
        self.outside_seconds = 0.0
        """Median seconds of a step outside its schedule, on the device where they are least: loading, hooks, optimizer.

        The others wait there for the last one, which is a matter of the schedule.
        """
        self._step_times: list[float] = []
        self._step_tokens: list[int] = []
        self._step_waits: list[float] = []
        self._step_outsides: list[float] = []
        self._was_disturbed: list[bool] = []
        self._ran: Any = None  # the order of passes that is measured
        self._began: float | None = None
        self._waited = 0.0
        self._tokens = 0
        self._num_steps_seen = 0

    @property
    def step_time(self) -> float:
        """Median seconds of an optimizer step."""
        return self._median(self._step_times)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a median step over its seconds."""
        return statistics.median(self._step_tokens) / self.step_time

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_steps_seen = trainer.global_step
        _forget_peak_memory(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._began is None:
            self._began, self._waited = time.perf_counter(), _wait_seconds(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += batch["input_ids"].numel()
        if trainer.global_step == self._num_steps_seen:
            return
        now, waited = time.perf_counter(), _wait_seconds(trainer)
        assert self._began is not None
        ran = _running(trainer)
        if ran != self._ran:
            self._ran = ran
            for kept in (self._step_times, self._step_tokens, self._step_waits, self._step_outsides, self._was_disturbed):
                kept.clear()
        self._step_times.append(now - self._began)
        self._step_waits.append(waited - self._waited)
        pipeline = getattr(trainer.strategy, "pipeline", None)
        self._step_outsides.append(0.0 if pipeline is None else self._step_times[-1] - pipeline.last_step_seconds)
        self._was_disturbed.append(pipeline is not None and (pipeline.last_step_was_recorded or _is_planning(trainer)))
        self._step_tokens.append(self._tokens)
        pl_module.log("tokens_per_second", self._tokens / self._step_times[-1], prog_bar=True)
        self._began, self._waited, self._tokens, self._num_steps_seen = now, waited, 0, trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        outside = self._median(self._step_outsides) if self._step_outsides else 0.0
        own = (_peak_memory(trainer.strategy.root_device), self._wait_share(), outside)
        devices = [own] * trainer.world_size
        if distributed.is_initialized():
            distributed.all_gather_object(devices, own)
        self.peak_memory = tuple(peak for peak, *_ in devices)
        if _statistics(trainer):
            self.wait_shares = tuple(share for _, share, _ in devices)
            self.outside_seconds = min(outside for *_, outside in devices)

    def _median(self, values: list[float]) -> float:
        """The median without the first steps and those that were disturbed, as far as there are others."""
        usual = [v for v, disturbed in zip(values, self._was_disturbed, strict=True) if not disturbed]
        return statistics.median(usual[self.num_warmup_steps :] or usual or values)

    def _wait_share(self) -> float:
        times, waits = self._step_times[self.num_warmup_steps :], self._step_waits[self.num_warmup_steps :]
        return sum(waits) / sum(times) if times else 0.0


def _statistics(trainer: L.Trainer) -> dict[str, Any]:
    return getattr(trainer.strategy, "statistics", {})


def _running(trainer: L.Trainer) -> Any:
    """What runs: cuts, devices and orders of passes; None without a pipeline."""
    plan = getattr(trainer.strategy, "plan", None)
    return None if plan is None else (plan.partition, plan.placement, plan.schedule)


def _is_planning(trainer: L.Trainer) -> bool:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(isinstance(callback, ZeroBubbleCallback) and callback.is_busy for callback in callbacks)


def _wait_seconds(trainer: L.Trainer) -> float:
    return _statistics(trainer).get("wait_seconds", 0.0)


def _forget_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Unlike getrusage's value this one can be reset: the jobs of a sweep share a process.
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
