"""A scheduling problem as flat arrays: what bounds, list scheduler and annealer compute on.

A pass is the integer `(kind * num_chunks + chunk) * num_microbatches + microbatch` with kinds F = 0, B = 1, W = 2. An
order is one flat array of passes, device after device; device d's part is `order[offset[d]:offset[d + 1]]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_zb.planning.budget import least_bytes
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

KINDS = (PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT)


class Instance(NamedTuple):
    """Placement, times and memory of one problem (a NamedTuple because numba takes it as it is).

    Args:
        device: device of each chunk, shape (chunks,).
        chunk_list: chunks grouped by device, in model order within a device.
        chunk_start: device d's chunks are `chunk_list[chunk_start[d]:chunk_start[d + 1]]`.
        offset: where each device's part of an order starts, shape (devices + 1,).
        duration: seconds on the chunk's own device, shape (3, chunks), rows F, B, W.
        lag: seconds of transfer before F (row 0) and before B (row 1) of a chunk, shape (2, chunks).
        activation: M_B of each chunk in bytes.
        stash: M_W of each chunk in bytes.
        limit: activation bytes of each device, infinite where there is none; with a rounding allowance.
        num_microbatches: m.
        reduction: seconds of each chunk's reduction of gradients after its last W, shape (chunks,).
    """

    device: np.ndarray
    chunk_list: np.ndarray
    chunk_start: np.ndarray
    offset: np.ndarray
    duration: np.ndarray
    lag: np.ndarray
    activation: np.ndarray
    stash: np.ndarray
    limit: np.ndarray
    num_microbatches: int
    reduction: np.ndarray

    @property
    def num_devices(self) -> int:
        return len(self.chunk_start) - 1

    @property
    def num_chunks(self) -> int:
        return len(self.device)

    @property
    def num_passes(self) -> int:
        return 3 * self.num_chunks * self.num_microbatches

    def chunks_of(self, device: int) -> list[int]:
        """The chunks of a device, in model order."""
        return [int(c) for c in self.chunk_list[self.chunk_start[device] : self.chunk_start[device + 1]]]

    @property
    def ideal_seconds(self) -> float:
        """The largest work of a device: no order can be shorter."""
        per_chunk = self.duration.sum(axis=0) * self.num_microbatches
        return float(np.bincount(self.device, weights=per_chunk, minlength=self.num_devices).max())


class ChunkTimes(NamedTuple):
    """Times and memory of the chunks of a placement; see `Instance`."""

    duration: np.ndarray
    lag: np.ndarray
    activation: np.ndarray
    stash: np.ndarray
    reduction: np.ndarray


def chunk_times(placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel) -> ChunkTimes:
    """Lay out what the chunks of a placement cost, each on its own device.

    Args:
        placement: chunks to devices.
        chunk_costs: one cost per chunk, for a device of speed 1.
        costs: links, device speeds and reduction of gradients.
    """
    owner = placement.devices
    seconds = [[c.forward, c.backward_input, c.backward_weight] for c in chunk_costs]
    lag = np.zeros((2, len(owner)))
    for c in range(1, len(owner)):
        if owner[c - 1] != owner[c]:
            payload = chunk_costs[c - 1].output_bytes  # the gradient that comes back has the size of the output
            lag[0, c] = costs.link_between(owner[c - 1], owner[c]).seconds(payload)
            lag[1, c - 1] = costs.link_between(owner[c], owner[c - 1]).seconds(payload)
    return ChunkTimes(
        duration=np.ascontiguousarray((np.array(seconds) / np.array([[costs.speed(d)] for d in owner])).T),
        lag=lag,
        activation=np.array([c.activation_bytes for c in chunk_costs], float),
        stash=np.array([c.weight_stash_bytes for c in chunk_costs], float),
        reduction=np.array([costs.reduction_seconds(c) for c in chunk_costs], float),
    )


def build_instance(
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    num_microbatches: int,
    limits: Sequence[float] | None = None,
) -> Instance:
    """Flatten a problem.

    Args:
        placement: chunks to devices.
        chunk_costs: one cost per chunk, for a device of speed 1.
        costs: links and device speeds.
        num_microbatches: m.
        limits: activation bytes of each device; None for no limit.
    """
    owner, chunks = placement.devices, placement.chunks_by_device()
    times = chunk_times(placement, chunk_costs, costs)
    activation = times.activation
    limit = np.full(placement.num_devices, np.inf) if limits is None else np.array(limits, float)
    counts = np.array([len(own) for own in chunks])
    return Instance(
        device=np.array(owner, np.int32),
        chunk_list=np.array([c for own in chunks for c in own], np.int32),
        chunk_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        offset=np.concatenate([[0], np.cumsum(counts) * 3 * num_microbatches]).astype(np.int32),
        duration=times.duration,
        lag=times.lag,
        activation=activation,
        stash=times.stash,
        # sums of bytes in another order may differ in the last bits; a whole M_B is far larger than this
        limit=limit + 1e-9 * np.maximum(activation.max(initial=0.0), np.where(np.isinf(limit), 0.0, np.abs(limit))),
        num_microbatches=num_microbatches,
        reduction=times.reduction,
    )


def minimum_memory(instance: Instance) -> list[float]:
    """The least activation bytes of each device with which any order exists; see `least_bytes`."""
    return [
        least_bytes((float(instance.activation[c]), float(instance.stash[c])) for c in instance.chunks_of(d))
        for d in range(instance.num_devices)
    ]


def serial_order(instance: Instance) -> np.ndarray:
    """One microbatch at a time: slow, and within every limit that any order meets."""
    n, m = instance.num_chunks, instance.num_microbatches
    per_device: list[list[int]] = [[] for _ in range(instance.num_devices)]
    for j in range(m):
        for c in range(n):
            per_device[instance.device[c]].append(c * m + j)
        for c in reversed(range(n)):
            per_device[instance.device[c]] += [(n + c) * m + j, (2 * n + c) * m + j]
    return np.array([x for own in per_device for x in own], np.int32)


def to_schedule(instance: Instance, order: np.ndarray) -> Schedule:
    """Passes by name, device by device."""
    n, m = instance.num_chunks, instance.num_microbatches
    named = [Pass(KINDS[x // (n * m)], x // m % n, x % m) for x in order.tolist()]
    offset = instance.offset
    return Schedule(tuple(tuple(named[offset[d] : offset[d + 1]]) for d in range(instance.num_devices)))


def from_schedule(instance: Instance, schedule: Schedule) -> np.ndarray:
    """The flat order of a schedule; a BW becomes B directly followed by W."""
    n, m = instance.num_chunks, instance.num_microbatches
    flat = [
        ("FBW".index(letter) * n + p.chunk) * m + p.microbatch
        for order in schedule.orders
        for p in order
        for letter in p.kind.value
    ]
    return np.array(flat, np.int32)


@njit(cache=True, nogil=True)
def start_times(instance, order, start, ends):
    """Run every pass as early as the order allows.

    Args:
        order: flat order.
        start: start of each pass, written; shape (passes,).
        ends: end of each device's last pass, or of its last reduction, written; shape (devices,).

    Returns:
        False where the order deadlocks.
    """
    num_devices = len(instance.chunk_start) - 1
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    end = np.full(3 * nm, -1.0)
    position = instance.offset[:-1].copy()
    waiter = np.full(3 * nm, -1, np.int32)  # the device that waits for a pass
    stack = np.empty(num_devices + 1, np.int32)
    top = 0
    for d in range(num_devices - 1, -1, -1):
        stack[top] = d
        top += 1
        ends[d] = 0.0
    done = 0
    while top > 0:
        top -= 1
        d = stack[top]
        i = position[d]
        now = ends[d]
        last = instance.offset[d + 1]
        while i < last:
            x = order[i]
            kind = x // nm
            c = (x - kind * nm) // m
            begin = now
            if kind == 0:
                if c > 0:
                    e = end[x - m]
                    if e < 0.0:
                        waiter[x - m] = d
                        break
                    begin = max(begin, e + instance.lag[0, c])
            else:
                e = end[x - nm]
                if e < 0.0:
                    break  # a B before its own F, or a W before its own B: never runnable
                if kind == 1 and c < n - 1:
                    e = end[x + m]
                    if e < 0.0:
                        waiter[x + m] = d
                        break
                    begin = max(begin, e + instance.lag[1, c])
            start[x] = begin
            now = begin + instance.duration[kind, c]
            end[x] = now
            i += 1
            done += 1
            w = waiter[x]
            if w >= 0:
                waiter[x] = -1
                stack[top] = w
                top += 1
        position[d] = i
        ends[d] = now
    if done < 3 * nm:
        return False
    reduce_gradients(instance, end, ends)
    return True


@njit(cache=True, nogil=True)
def reduce_gradients(instance, end, ends):
    """Let each device's end wait for its reductions, which follow each other as the chunks finish."""
    m, nm = instance.num_microbatches, len(instance.device) * instance.num_microbatches
    if not instance.reduction.any():
        return
    for d in range(len(ends)):
        own = instance.chunk_list[instance.chunk_start[d] : instance.chunk_start[d + 1]]
        finished = np.array([end[2 * nm + c * m + m - 1] for c in own])
        now = 0.0
        for i in np.argsort(finished):
            now = max(now, finished[i]) + instance.reduction[own[i]]
        ends[d] = max(ends[d], now)


@njit(cache=True, nogil=True)
def fits_memory(instance, order):
    """Whether every prefix of every device stays within its limit."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    for d in range(len(instance.chunk_start) - 1):
        held = 0.0
        for i in range(instance.offset[d], instance.offset[d + 1]):
            kind = order[i] // nm
            c = (order[i] - kind * nm) // m
            if kind == 0:
                held += instance.activation[c]
            elif kind == 1:
                held += instance.stash[c] - instance.activation[c]
            else:
                held -= instance.stash[c]
            if held > instance.limit[d]:
                return False
    return True


@njit(cache=True, nogil=True)
def span_cost(instance, order, start, ends, own_start):
    """max over devices of end - own_start * start of the first pass: step_time with own_start 1, makespan with 0."""
    cost = 0.0
    for d in range(len(ends)):
        first = start[order[instance.offset[d]]]
        cost = max(cost, ends[d] - own_start * first)
    return cost


@njit(cache=True, nogil=True)
def mean_cost(instance, order, start, ends, own_start, least):
    """As `span_cost`, but instead of the longest span the root mean square of what spans exceed a bound, above that bound."""
    squares = 0.0
    for d in range(len(ends)):
        excess = max(0.0, ends[d] - own_start * start[order[instance.offset[d]]] - least)
        squares += excess * excess
    return least + np.sqrt(squares / len(ends))


def on_stairs(instance: Instance, steps: int) -> Instance:
    """The same problem with limits that rise by one chunk at so many devices, evenly apart, up to the given ones."""
    if steps == 0:
        return instance
    climbed = np.arange(instance.num_devices) * (steps + 1) // instance.num_devices
    limit = instance.limit - (steps - climbed) * instance.activation.max()
    return instance._replace(limit=np.maximum(limit, minimum_memory(instance)))


def measure(instance: Instance, order: np.ndarray, own_start: float = 1.0) -> float:
    """step_time (own_start 1) or makespan (0) of an order in seconds; infinite where it deadlocks."""
    start, ends = np.empty(instance.num_passes), np.empty(instance.num_devices)
    if not start_times(instance, order, start, ends):
        return float("inf")
    return float(span_cost(instance, order, start, ends, own_start))
