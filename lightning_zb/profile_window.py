"""A few steps in which the pipeline is measured, and what rank 0 knows after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_zb.execution.links import clock_offsets, measure_links
from lightning_zb.execution.live_bytes import LiveBytes, parameter_storages
from lightning_zb.execution.pass_samples import Samples, StepKind, pass_samples, usual
from lightning_zb.execution.profiler import Clock, PassTimes, StepRecorder, clock_of, joined_timeline, read_times
from lightning_zb.execution.speed import relative_speeds, seconds_in_turn
from lightning_zb.execution.workspace import workspace_of
from lightning_zb.model.layer_costs import (
    ItemProfile,
    at_unit_speed,
    cost_model,
    item_sizes,
    movable_shares,
    pass_overhead,
    profile_items,
    usual_overhead,
)
from lightning_zb.model.layer_recorder import LayerRecorder
from lightning_zb.pipeline import Pipeline
from lightning_zb.planning.costs import CostModel, Link, PassOverhead
from lightning_zb.planning.timeline import Timeline
from lightning_zb.replicas import ShardGroups

_Steps = Sequence[tuple[StepKind, tuple[PassTimes, ...]]]
"""What each step was for, and its passes on one device."""

_KEPT_STEPS = 5  # whole steps that travel to rank 0, which shows the one of median length


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What one device measured.

    Args:
        device: which.
        items: costs of its items; empty where no step timed layers.
        steps: for each of the last full steps at full speed its passes.
        seconds: of passes.
        peak_bytes: activation bytes at their peak; on CUDA what the allocator gave out since the step began, less what
            passes hold only while they run.
        reference_seconds: what the work took by which devices compare; None where it was not done.
        joins_ends: see `Pipeline.joins_ends`.
    """

    device: int
    items: list[ItemProfile]
    steps: list[tuple[PassTimes, ...]]
    seconds: Samples
    peak_bytes: float
    reference_seconds: float | None
    joins_ends: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """What all devices measured.

    Args:
        costs: of layers and links; None where no step timed layers.
        items: the layers' costs with their spread; none where no step timed them.
        timeline: the full step of median length; None where every step was a short one.
        pass_seconds: usual seconds by (chunk, "F", "B", "W" or "BW").
        running_seconds: mean seconds of full steps, the longest and the shortest left out, of those that ran as planned
            where there were any; what disturbs passes in every step is part of them.
        peak_bytes: by device; zeros where no step counted bytes.
        joins_ends: whether first and last chunk must stay on one device.
    """

    costs: CostModel | None
    items: tuple[ItemProfile, ...]
    timeline: Timeline | None
    pass_seconds: dict[tuple[int, str], float]
    running_seconds: dict[tuple[int, str], float]
    peak_bytes: tuple[float, ...]
    joins_ends: bool

    @property
    def step_seconds(self) -> float | None:
        """Seconds from the first pass to the end of the last in the step of median length; None where there is none."""
        return None if self.timeline is None else self.timeline.makespan


class ProfileWindow:
    """Records consecutive steps of this process's devices.

    Args:
        pipeline: what runs.
        optimizers: whose state counts as model state.
        kinds: what each step is for; layers are measured where steps count bytes and time layers.
        measures_links: whether to measure links at the end, else those of the running plan are kept.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizers: Sequence[Optimizer],
        kinds: Sequence[StepKind],
        measures_links: bool = True,
    ) -> None:
        self._pipeline, self._optimizers = pipeline, optimizers
        self._kinds = deque(kinds)
        self._measures_links = measures_links
        self._clock: Clock = clock_of(pipeline.device)
        self._running: list[StepRecorder] = []
        self._counted: list[LayerRecorder] = []
        self._timed: list[tuple[StepKind, list[StepRecorder]]] = []
        self._allocated_before = 0
        self._grown_peak = 0

    @property
    def is_over(self) -> bool:
        """Whether all its steps have run."""
        return not self._kinds

    @property
    def _times_layers(self) -> bool:
        return bool(self._counted) and any(kind is StepKind.LAYERS for kind, _ in self._timed)

    def begin_step(self) -> None:
        """Record the coming step."""
        pipeline, kind = self._pipeline, self._kinds[0]
        if kind in (StepKind.BYTES, StepKind.LAYERS):
            counts = kind is StepKind.BYTES
            ignored = parameter_storages(pipeline.module.parameters()) if counts else frozenset()
            self._running = [
                LayerRecorder(
                    self._clock,
                    pipeline.plan.partition,
                    LiveBytes(ignored) if counts else None,
                    workspace_of(pipeline.device) if counts else None,
                )
                for _ in pipeline.devices
            ]
        else:
            self._running = [StepRecorder(self._clock) for _ in pipeline.devices]
        if pipeline.device.type == "cuda" and kind is not StepKind.BYTES:
            torch.cuda.reset_peak_memory_stats(pipeline.device)
            self._allocated_before = torch.cuda.memory_allocated(pipeline.device)
        pipeline.record(self._running, kind.runs_whole)

    def end_step(self) -> None:
        """The step is over."""
        self._pipeline.record(None)
        kind = self._kinds.popleft()
        if kind is StepKind.BYTES:
            self._counted = [recorder for recorder in self._running if isinstance(recorder, LayerRecorder)]
        else:
            self._timed.append((kind, self._running))
            holds_what_is_planned = kind in (StepKind.LAYERS, StepKind.RUNNING)
            if self._pipeline.device.type == "cuda" and holds_what_is_planned:
                grown = torch.cuda.max_memory_allocated(self._pipeline.device) - self._allocated_before
                self._grown_peak = max(self._grown_peak, grown)
        self._running = []

    def gather(self) -> Profile | None:
        """Bring all devices' measurements together (a collective, between steps).

        Returns:
            On rank 0 what was measured, None elsewhere.
        """
        channels = self._pipeline.channels
        reference = None
        if channels is not None and self._measures_links:
            reference = seconds_in_turn(self._pipeline.device, self._clock, channels.control)
        steps = [
            [(kind, read_times(recorders[i])) for kind, recorders in self._timed] for i in range(len(self._pipeline.devices))
        ]
        overhead = self._overhead(steps)
        own = [
            self._device_profile(index, device, steps[index], overhead, reference)
            for index, device in enumerate(self._pipeline.devices)
        ]
        link: Link | tuple[tuple[Link, ...], ...] = self._pipeline.plan.costs.link
        offsets = None
        if channels is not None:
            if self._measures_links:
                link = measure_links(channels, max((p.cost.output_bytes for d in own for p in d.items), default=0.0))
            offsets = clock_offsets(channels)
        parts = self._pipeline.gather(own)
        if parts is None:
            return None
        devices = sorted((device for part in parts for device in part), key=lambda d: d.device)
        return _join(devices, link, offsets, self._pipeline.plan.costs.device_speed, overhead)

    def _overhead(self, steps: Sequence[_Steps]) -> PassOverhead:
        """What a pass takes besides its items, from all devices; none where no step timed layers (a collective)."""
        if not self._times_layers:
            return PassOverhead()
        found = [pass_overhead(_layered(own)) for own in steps]
        channels = self._pipeline.channels
        everywhere: list[Any] = [found]
        if channels is not None:
            everywhere = [None] * dist.get_world_size(channels.control)
            dist.all_gather_object(everywhere, found, group=channels.control)
        return usual_overhead(chain.from_iterable(everywhere))

    def _device_profile(
        self, index: int, device: int, steps: _Steps, overhead: PassOverhead, reference: float | None
    ) -> DeviceProfile:
        pipeline = self._pipeline
        plan = pipeline.plan
        seconds = pass_samples(steps)
        items: list[ItemProfile] = []
        peak = 0.0
        if self._counted:
            meter, workspace = self._counted[index].meter, self._counted[index].workspace
            assert meter is not None
            peak = float(meter.peak)
            if workspace is not None:
                peak = max(peak, self._grown_peak - max(workspace.bytes.values(), default=0.0))
        if self._times_layers:
            counted = self._counted[index]
            copied = pipeline.ending is not None and pipeline.ending.copies
            held, waiting = pipeline.ownership.own_parameters(), pipeline.waiting_gradients
            sizes = item_sizes(pipeline.stack, held, counted.users, self._optimizers, copied, waiting)
            sizes = _largest(sizes, pipeline.shard_groups)
            chunks = plan.placement.chunks_of(device)
            movable = movable_shares(pipeline.stack, held, counted.users, counted.deferred)
            items = profile_items(
                pipeline.stack, plan.partition, chunks, _layered(steps), seconds, counted, sizes, movable, overhead
            )
        num_parts = sum(len(p.kind.value) for p in plan.schedule.orders[device])
        running = [passes for kind, passes in steps if kind is StepKind.RUNNING] or [passes for _, passes in steps]
        full = [step for step in running if sum(len(t.run.kind.value) for t in step) == num_parts]  # not the last of an epoch
        kept = [tuple(replace(t, items={}) for t in step) for step in full[-_KEPT_STEPS:]]
        return DeviceProfile(device, items, kept, seconds, peak, reference, pipeline.joins_ends)


def _middle(by_length: Sequence[int]) -> Sequence[int]:
    """Steps without the longest and the shortest quarter of them."""
    cut = (len(by_length) + 1) // 4
    return by_length[cut : len(by_length) - cut]


def _means(steps: Iterable[Sequence[PassTimes]]) -> dict[tuple[int, str], float]:
    """Mean seconds of the passes of steps that ran as planned."""
    return {key: mean(values) for key, values in pass_samples((StepKind.RUNNING, passes) for passes in steps).items()}


def _layered(steps: _Steps) -> list[tuple[PassTimes, ...]]:
    """The passes of the steps that timed layers."""
    return [passes for kind, passes in steps if kind is StepKind.LAYERS]


def _largest(sizes: dict[int, tuple[float, float]], groups: ShardGroups | None) -> dict[int, tuple[float, float]]:
    """Of each item the sizes on the replica where it is largest: they divide optimizer state by whole parameters."""
    if groups is None:
        return sizes
    everywhere: list[Any] = [None] * groups.objects.size()
    dist.all_gather_object(everywhere, sizes, group=groups.objects)
    return {item: (own, max(other.get(item, (0.0, 0.0))[1] for other in everywhere)) for item, (own, _) in sizes.items()}


def _join(
    devices: Sequence[DeviceProfile],
    link: Link | tuple[tuple[Link, ...], ...],
    offsets: Sequence[float] | None,
    speeds: tuple[float, ...] | None,
    overhead: PassOverhead,
) -> Profile:
    """Put the devices' measurements together.

    Args:
        devices: what each measured.
        link: between them.
        offsets: of their hosts' clocks.
        speeds: of the devices, where they did not compare themselves now.
        overhead: of passes.
    """
    references = [d.reference_seconds for d in devices if d.reference_seconds is not None]
    if len(references) == len(devices):
        speeds = relative_speeds(references)
    items = tuple(at_unit_speed(i, 1.0 if speeds is None else speeds[d.device]) for d in devices for i in d.items)
    num_steps = min(len(device.steps) for device in devices)
    timelines = [joined_timeline([d.steps[step] for d in devices], offsets) for step in range(num_steps)]
    by_length = sorted(range(num_steps), key=lambda step: timelines[step].makespan)
    return Profile(
        costs=cost_model(items, link, speeds, overhead) if items else None,
        items=tuple(sorted(items, key=lambda item: item.index)),
        timeline=timelines[by_length[num_steps // 2]] if timelines else None,
        pass_seconds={key: usual(values) for device in devices for key, values in device.seconds.items()},
        running_seconds=_means(d.steps[step] for d in devices for step in _middle(by_length)),
        peak_bytes=tuple(device.peak_bytes for device in devices),
        joins_ends=any(device.joins_ends for device in devices),
    )
