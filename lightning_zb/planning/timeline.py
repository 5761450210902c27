"""When passes run, predicted or measured, and the figures that a schedule is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.plan import Plan, Prediction
from lightning_zb.planning.schedule import Pass, Schedule
from lightning_zb.planning.simulation import PassTable, reductions, run_step, tabulate

Interval = tuple[float, float]

_WARM_STEPS = 8  # steps until consecutive steps repeat; as many again are averaged


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every pass of one step, in seconds from any common zero.

    Args:
        orders: for each device its passes, in the order they ran.
        starts: for each device the start of each pass of `orders`.
        ends: likewise the ends.
        waits: for each device the intervals it stood waiting for a transfer; empty for a prediction, where every gap
            is a wait.
        reductions: for each device the chunk, start and end of each reduction of gradients, which runs beside its passes.
    """

    orders: tuple[tuple[Pass, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    waits: tuple[tuple[Interval, ...], ...] = ()
    reductions: tuple[tuple[tuple[int, float, float], ...], ...] = ()

    @property
    def num_devices(self) -> int:
        return len(self.orders)

    def times(self) -> dict[Pass, Interval]:
        """Start and end by pass."""
        return {
            p: (start, end)
            for order, starts, ends in zip(self.orders, self.starts, self.ends, strict=True)
            for p, start, end in zip(order, starts, ends, strict=True)
        }

    @property
    def spans(self) -> tuple[float, ...]:
        """For each device the seconds from the start of its first pass to the end of its last, or of its last reduction."""
        return tuple(end - min(starts) if starts else 0.0 for starts, end in zip(self.starts, self.device_ends, strict=True))

    @property
    def device_ends(self) -> tuple[float, ...]:
        """When each device has run its last pass and reduced its gradients."""
        after = self.reductions or ((),) * self.num_devices
        return tuple(max((*ends, *(end for *_, end in own)), default=0.0) for ends, own in zip(self.ends, after, strict=True))

    @property
    def step_time(self) -> float:
        """The largest span: what a step costs where devices may run out of step (the papers' cost)."""
        return max(self.spans)

    @property
    def makespan(self) -> float:
        """End to end of the step alone: what it costs with a synchronous optimizer step."""
        return max(self.device_ends) - min(t for device in self.starts for t in device)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work of each device."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """For each device the seconds of a step (`step_time`) in which it does not work."""
        step_time = self.step_time
        return tuple(step_time - busy for busy in self.busy)

    @property
    def idle_fraction(self) -> float:
        """Idle over num_devices x step_time."""
        step_time = self.step_time
        return sum(self.idle) / (self.num_devices * step_time) if step_time > 0 else 0.0


def simulate(
    schedule: Schedule,
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    fifo_links: bool = False,
) -> Timeline:
    """Run every pass as early as the order allows.

    Args:
        schedule: a complete order, see `Schedule.check`.
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1.
        costs: gives links and device speeds.
        fifo_links: let transfers of one ordered pair of devices follow each other; without, they do not disturb each other.

    Raises:
        ValueError: the schedule deadlocks.
    """
    table = tabulate(placement, chunk_costs, costs, schedule.num_microbatches, fifo_links)
    return _timeline(schedule, table)


def _timeline(schedule: Schedule, table: PassTable) -> Timeline:
    order, offsets = table.encode(schedule)
    start, end = run_step(table, order, offsets)
    found: list[list[tuple[int, float, float]]] = [[] for _ in schedule.orders]
    for device, chunk, begins, ends in reductions(table, order, end):
        found[device].append((chunk, begins, ends))
    after = tuple(map(tuple, found)) if any(found) else ()
    return Timeline(schedule.orders, _by_device(start, offsets), _by_device(end, offsets), reductions=after)


def _by_device(values: np.ndarray, offsets: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(values[a:b].tolist()) for a, b in pairwise(offsets))


def transfers(
    timeline: Timeline, placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel
) -> dict[Pass, Interval]:
    """When the output of each pass is on the way to another device, by the pass that sends it (uncontended links)."""
    result = {}
    for p, (_, end) in timeline.times().items():
        step = 1 if p.kind.value == "F" else -1 if p.kind.sends_gradient else 0
        there = p.chunk + step
        if step and 0 <= there < placement.num_chunks and placement.devices[there] != placement.devices[p.chunk]:
            size = chunk_costs[min(p.chunk, there)].output_bytes
            result[p] = (end, end + costs.transfer_seconds(placement.devices[p.chunk], placement.devices[there], size))
    return result


def overlapped_seconds(
    timeline: Timeline, placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel
) -> tuple[float, ...]:
    """For each device the seconds in which an input is under way to it while it works (the second paper's OverlapTime)."""
    return tuple(
        common_seconds(arriving, merged(zip(starts, ends, strict=True)))
        for arriving, starts, ends in zip(
            incoming(timeline, placement, chunk_costs, costs), timeline.starts, timeline.ends, strict=True
        )
    )


def incoming(
    timeline: Timeline, placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel
) -> tuple[list[Interval], ...]:
    """For each device the times in which an input is under way to it, as disjoint intervals in order."""
    found: list[list[Interval]] = [[] for _ in timeline.orders]
    for p, interval in transfers(timeline, placement, chunk_costs, costs).items():
        found[placement.devices[p.chunk + (1 if p.kind.value == "F" else -1)]].append(interval)
    return tuple(merged(intervals) for intervals in found)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of some intervals, as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def common_seconds(first: list[Interval], second: list[Interval]) -> float:
    """Length of the intersection of two unions of disjoint, sorted intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def memory_curves(schedule: Schedule, placement: Placement, chunk_costs: Sequence[ChunkCost]) -> tuple[tuple[float, ...], ...]:
    """For each device the activation bytes held after each of its passes."""
    table = tabulate(placement, chunk_costs, CostModel(()), schedule.num_microbatches)
    order, offsets = table.encode(schedule)
    return tuple(tuple(np.cumsum(table.memory[order[a:b]]).tolist()) for a, b in pairwise(offsets))


def memory_peaks(schedule: Schedule, placement: Placement, chunk_costs: Sequence[ChunkCost]) -> tuple[float, ...]:
    """The activation peak of each device in bytes."""
    return tuple(max((0.0, *curve)) for curve in memory_curves(schedule, placement, chunk_costs))


def steady_period(table: PassTable, order: np.ndarray, offsets: np.ndarray, costs: CostModel, validation: bool = True) -> float:
    """Seconds per step when many steps follow each other without a barrier.

    Args:
        table: the passes of one step.
        order: flat orders, see `PassTable.encode`.
        offsets: where each device's part starts.
        costs: gives the links, over which the validation result travels.
        validation: with post-validation (section 4 of the first paper) a device's first loss or B of a step waits until
            the result of the step before, known when the last device has finished it, has come back. Without, nothing
            but the devices' own orders couples one step to the next.
    """
    num_devices = table.num_devices
    latency = np.array([[costs.transfer_seconds(a, b, 0.0) for b in range(num_devices)] for a in range(num_devices)])
    gate = np.array([_first_gated(table, order[a:b]) for a, b in pairwise(offsets)], dtype=np.int64)
    free, gate_time = np.zeros(num_devices), np.zeros(num_devices)
    middle = free
    for step in range(2 * _WARM_STEPS):
        run_step(table, order, offsets, free, gate if validation else None, gate_time)
        gate_time = (free[:, None] + latency).max(axis=0)
        if step == _WARM_STEPS - 1:
            middle = free.copy()
    return float((free - middle).max() / _WARM_STEPS)


def _first_gated(table: PassTable, order: np.ndarray) -> int:
    """Position of a device's first pass that must not run on unvalidated parameters: a loss or a backward."""
    loss = (order < table.num_cells) & (order >= table.num_cells - table.num_microbatches)
    return int(np.argmax(loss | (order >= table.num_cells)))


def least_work(placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel, num_microbatches: int) -> float:
    """Seconds of the busiest device, each backward run the cheaper way, whole or split; no order is faster."""
    return max(
        num_microbatches
        * sum(c.forward + min(c.whole_backward, c.backward_input + c.backward_weight) for c in own)
        / costs.speed(device)
        for device in range(placement.num_devices)
        for own in [[chunk_costs[c] for c in placement.chunks_of(device)]]
    )


def bubble_rate(plan: Plan, timeline: Timeline) -> float:
    """Share of a step's time, as planned or as measured, beyond what its own passes would take if no device ever waited."""
    step = timeline.step_time
    return (step - plan.without_bubbles(timeline.busy)) / step if step > 0 else 0.0


def planned_timeline(plan: Plan) -> Timeline:
    """When the plan's passes run by prediction."""
    return simulate(plan.schedule, plan.placement, plan.costs.chunks(plan.partition), plan.costs)


def predict_with(plan: Plan, costs: CostModel) -> Prediction:
    """What the performance model expects of a plan with these costs, whatever it was made with."""
    return predict(plan.schedule, plan.placement, costs.chunks(plan.partition), costs)


def predict(
    schedule: Schedule,
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    lower_bound: float | None = None,
    fifo_links: bool = False,
) -> Prediction:
    """What the performance model expects of a schedule.

    Args:
        schedule: a complete order, see `Schedule.check`.
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1.
        costs: gives links and device speeds.
        lower_bound: of step_time, where the planner knows one; None: the least work of the busiest device.
        fifo_links: as in `simulate`.
    """
    table = tabulate(placement, chunk_costs, costs, schedule.num_microbatches, fifo_links)
    order, offsets = table.encode(schedule)
    timeline = _timeline(schedule, table)
    step_time = timeline.step_time
    speeds = [costs.speed(d) for d in range(placement.num_devices)]
    busy = tuple(float(table.duration[order[a:b]].sum()) for a, b in pairwise(offsets))
    ideal = sum(seconds * speed for seconds, speed in zip(busy, speeds, strict=True)) / sum(speeds)
    return Prediction(
        step_time=step_time,
        makespan=timeline.makespan,
        period=steady_period(table, order, offsets, costs),
        lower_bound=least_work(placement, chunk_costs, costs, schedule.num_microbatches)
        if lower_bound is None
        else lower_bound,
        bubble_rate=max(0.0, (step_time - ideal) / step_time) if step_time > 0 else 0.0,  # rounding of sums may leave -1e-16
        idle_fraction=timeline.idle_fraction,
        peak_bytes=memory_peaks(schedule, placement, chunk_costs),
        busy=busy,
    )
