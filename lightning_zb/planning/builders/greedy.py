"""A list scheduler for any placement, costs and memory limits: next comes the pass that can start first.

It is the heuristic of the first paper (section 3.1) freed from its one chunk per device: F and B alternate, and W fill
what would be idle, make room when memory is full, and otherwise wait for the end. W are placed only once it is known
when the next F or B can start, since nothing else depends on them.

Two observations make it tight. Times that are multiples of one unit keep the passes of different devices aligned, so the
order up to the last forwards comes from rounded times without links, the rest from the true ones. And while the pipeline
drains, an F that would arrive before a B in its place is through goes first: it lies on the longest way to the end.

It never runs into a full memory that nothing frees. On every device an F is admitted only where the microbatches there
could still be brought through one after the other, oldest first, each with what those before it gave back. The oldest
microbatch of all can then always advance, at any limit from `smallest_limits` on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, unique

import numpy as np
from numba import njit

from lightning_zb.planning.budget import least_bytes
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.simulation import Integers, PassTable

_TOLERANCE = 1e-9  # of a limit: sums of bytes in floating point


@unique
class Detour(Enum):
    """The time on the way of the first microbatch that rounding leaves out, in whole units and rounded down."""

    NONE = "none"
    LINKS = "links"  # each link where the links up to it come to one more unit
    RETURN = "return"  # on the way back, where what is left out between a chunk's F and its B comes to one more unit


@dataclass(frozen=True, slots=True)
class Choices:
    """What the list scheduler is free to do; builders try several and keep the best.

    Args:
        resolution: the order up to the last forwards comes from times rounded to this many parts of the mean F, without
            links; 0 takes the true times throughout.
        detour: what the first microbatch pays beyond those rounded times, so that more F come before the first B.
        patience: while the pipeline drains, how much later than a B an F may start and still go first, in units of B.
        fill_forward: put W before an F that it delays where the device would otherwise become the one with the most
            idle time; otherwise W fill only what they fit into.
        fill_backward: likewise before a B.
        spare: how many microbatches' later chunks an F of an early chunk must leave room for beside the oldest's.
        rounded_drain: take the order of F and B from the rounded times to the end; only W are placed by the true ones.
    """

    resolution: int = 1
    detour: Detour = Detour.NONE
    patience: float = 1.0
    fill_forward: bool = True
    fill_backward: bool = True
    spare: float = 0.0
    rounded_drain: bool = False


def rework(
    problem: Problem,
    table: PassTable,
    order: Integers,
    offsets: Integers,
    limits: tuple[float, ...],
    from_drain: bool,
    choices: Choices = Choices(),
) -> Integers:
    """Order a schedule of F, B and W anew by the true costs, within other limits that leave room for it.

    Args:
        problem: what the order is for; its limits do not matter.
        table: its passes.
        order: all F and B of a complete order, or all its passes, without BW.
        offsets: where each device's part of a complete order starts.
        limits: bytes by device.
        from_drain: F and B keep their order only up to the last F of the device's first chunk; otherwise throughout, and
            only W move.
        choices: which W go before an F or B, and how the drain is ordered; resolution does not matter.

    Returns:
        The new order; the old one where its F and B cannot be kept.
    """
    lead = order[order < 2 * table.num_cells]
    lengths = _until_last_forward(lead, offsets // 3 * 2, problem) if from_drain else np.diff(offsets) // 3 * 2
    reworked = _list_schedule(replace(problem, limits=limits), choices, table, offsets, lead, lengths)
    return order if reworked[-1] < 0 else reworked


def smallest_limits(problem: Problem) -> tuple[float, ...]:
    """For each device the least activation bytes with which any order exists; see `least_bytes`."""
    costs = problem.chunk_costs
    return tuple(
        least_bytes((costs[c].activation_bytes, costs[c].weight_stash_bytes) for c in chunks)
        for chunks in problem.placement.chunks_by_device()
    )


def order_offsets(problem: Problem) -> Integers:
    """Where each device's part of a flat order of F, B and W starts."""
    return np.cumsum([0] + [3 * problem.num_microbatches * len(own) for own in problem.placement.chunks_by_device()])


def list_order(problem: Problem, choices: Choices, table: PassTable) -> tuple[Integers, Integers]:
    """One list schedule, as flat arrays (`PassTable.encode`)."""
    offsets = order_offsets(problem)
    lead = np.zeros(0, dtype=np.int64)
    lead_lengths = np.zeros(problem.placement.num_devices, dtype=np.int64)
    if choices.resolution:
        rounded = _list_schedule(
            problem, choices, _rounded(table, choices.resolution, choices.detour), offsets, lead, lead_lengths
        )
        lead = rounded[rounded < 2 * table.num_cells]
        shares = offsets // 3 * 2
        lead_lengths = np.diff(shares) if choices.rounded_drain else _until_last_forward(lead, shares, problem)
    order = _list_schedule(problem, choices, table, offsets, lead, lead_lengths)
    if order[-1] < 0:  # an order that fitted rounded times need not fit the true ones; without it there is always one
        order = _list_schedule(problem, choices, table, offsets, lead[:0], np.zeros_like(lead_lengths))
    return order, offsets


def _rounded(table: PassTable, resolution: int, detour: Detour) -> PassTable:
    """Durations as multiples of the mean F over resolution, at least one; transfers take no time but for the detour.

    W count a thousandth less, which decides ties between a W and the F or B that it would just not delay.
    """
    cells = table.num_cells
    unit = table.duration[:cells].mean() / resolution
    if unit == 0.0:
        return table
    duration = np.where(table.duration > 0, np.maximum(np.round(table.duration / unit), 1.0), 0.0)
    lag = np.zeros_like(table.lag)
    forwards = np.arange(table.num_chunks) * table.num_microbatches
    if detour is Detour.LINKS:
        way = np.concatenate([forwards, cells + forwards[::-1]])
        lag[way] = np.diff(np.floor(np.cumsum(table.lag[way]) / unit), prepend=0.0)
    elif detour is Detour.RETURN:
        lost = (table.duration + table.lag) / unit - duration
        lost_between = np.cumsum((lost[forwards[1:]] + lost[cells + forwards[1:]])[::-1]) + table.lag[forwards[-2::-1]] / unit
        num_units = np.floor(np.maximum.accumulate(np.maximum(lost_between, 0.0)))
        lag[cells + forwards[:0:-1]] = np.diff(num_units, prepend=0.0)
    duration[2 * cells : 3 * cells] *= 0.999
    return replace(table, duration=duration, lag=lag)


def _until_last_forward(lead: Integers, offsets: Integers, problem: Problem) -> Integers:
    """For each device the F and B up to the last F of its first chunk."""
    m = problem.num_microbatches
    lengths = []
    for device in range(problem.placement.num_devices):
        part = lead[offsets[device] : offsets[device + 1]]
        last = problem.placement.chunks_of(device)[0] * m + m - 1
        lengths.append(int(np.flatnonzero(part == last)[0]) + 1)
    return np.array(lengths, dtype=np.int64)


def _list_schedule(
    problem: Problem, choices: Choices, table: PassTable, offsets: Integers, lead: Integers, lead_lengths: Integers
) -> Integers:
    """Run the kernel; the last entry is -1 where the lead cannot be kept."""
    activation = np.array([c.activation_bytes for c in problem.chunk_costs], dtype=np.float64)
    stash = np.array([c.weight_stash_bytes for c in problem.chunk_costs], dtype=np.float64)
    limits = np.array(problem.limits, dtype=np.float64)
    limits = np.where(np.isfinite(limits), limits + _TOLERANCE * np.abs(limits), np.inf)
    order = np.full(offsets[-1], -1, dtype=np.int64)
    _fill_order(
        np.array(problem.placement.devices, dtype=np.int64),
        problem.num_microbatches,
        table.duration,
        table.lag,
        activation,
        stash,
        limits,
        choices.patience,
        choices.fill_forward,
        choices.fill_backward,
        choices.spare,
        lead,
        lead_lengths,
        offsets,
        order,
    )
    return order


@njit(cache=True, nogil=True)
def _is_safe(own, chunk, microbatch, oldest, following, activation, room):  # pragma: no cover (compiled)
    """Whether one more F leaves a way out: each microbatch in turn gets what it lacks, then gives back all it holds.

    Args:
        own: the chunks of the device.
        chunk, microbatch: the F.
        oldest: the first microbatch that is not through on the device.
        following, activation: as in `_fill_order`.
        room: bytes that the device may hold beyond those that only B can free.
    """
    newest = microbatch
    for c in own:
        newest = max(newest, following[0, c] - 1)
    room -= activation[chunk]
    for k in range(oldest, newest + 1):
        lacking, holding = 0.0, 0.0
        for c in own:
            if following[0, c] <= k and not (c == chunk and k == microbatch):
                lacking += activation[c]
            elif following[1, c] <= k:
                holding += activation[c]
        if lacking > room:
            return False
        room += holding
    return True


@njit(cache=True, nogil=True)
def _fill_order(  # pragma: no cover (compiled)
    owner,
    m,
    duration,
    lag,
    activation,
    stash,
    limits,
    patience,
    fill_forward,
    fill_backward,
    spare,
    lead,
    lead_lengths,
    offsets,
    order,
):
    """List scheduling proper: fill `order` (all -1) device by device; see the module for the rules.

    Args:
        owner, m: device of each chunk, number of microbatches.
        duration, lag: by pass, see `PassTable`.
        activation, stash: M_B and M_W by chunk.
        limits: bytes by device.
        patience, fill_forward, fill_backward, spare: see `Choices`.
        lead, lead_lengths: for each device the F and B that come first, `lead_lengths` of each device's 2/3 of `offsets`.
        offsets, order: where each device's part of the order starts, and the order.
    """
    num_chunks, num_devices = len(owner), len(offsets) - 1
    cells = num_chunks * m
    arrival = np.full(2 * cells, np.inf)  # when the input of an F or B is there; inf until known
    arrival[:m] = 0.0
    following = np.zeros((2, num_chunks), dtype=np.int64)  # next microbatch of each chunk's F and B
    chunks = np.argsort(owner, kind="mergesort")  # grouped by device, in model order within a device
    bounds = np.searchsorted(owner[chunks], np.arange(num_devices + 1))
    first_chunk = np.full(num_devices, -1)
    growth = np.zeros(num_devices)  # the most that a B adds, where M_W exceeds M_B
    most_owed = np.zeros(num_devices)  # the most that a microbatch with an F behind it still needs
    for c in range(num_chunks):
        d = owner[c]
        first_chunk[d] = c if first_chunk[d] < 0 else first_chunk[d]
        growth[d] = max(growth[d], stash[c] - activation[c])
        most_owed[d] += activation[c] if c != first_chunk[d] else 0.0
    free, held, idle = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    live = np.zeros(num_devices)  # what W cannot free: M_B of microbatches whose B is still due
    position = offsets[:-1].copy()
    num_done = np.zeros(num_devices, dtype=np.int64)
    due = np.empty(cells, dtype=np.int64)  # queues of cells whose W is due, one region per device
    head, tail = offsets[:-1] // 3, offsets[:-1] // 3
    after_backward = np.zeros(num_devices, dtype=np.bool_)
    choice, choice_start = np.full(num_devices, -1), np.full(num_devices, np.inf)
    stale = np.ones(num_devices, dtype=np.bool_)
    remaining = 2 * cells
    while remaining > 0:
        for d in range(num_devices):  # what would each device do next?
            if not stale[d]:
                continue
            stale[d] = False
            choice_start[d] = np.inf
            if num_done[d] < lead_lengths[d]:
                here = lead[offsets[d] // 3 * 2 + num_done[d]]
                choice[d], choice_start[d] = here, max(free[d], arrival[here])
                continue
            own = chunks[bounds[d] : bounds[d + 1]]
            oldest = m
            for c in own:
                oldest = min(oldest, following[1, c])
            forward, forward_start, backward, backward_start, later = -1, np.inf, -1, np.inf, 0.0
            for c in own[::-1]:  # at equal times the pass that has come furthest
                j = following[1, c]
                if j < following[0, c] and arrival[cells + c * m + j] < np.inf:
                    begin = max(free[d], arrival[cells + c * m + j])
                    if begin <= backward_start:
                        backward, backward_start = cells + c * m + j, begin
                j = following[0, c]
                if j < m and arrival[c * m + j] < np.inf:
                    begin = max(free[d], arrival[c * m + j])
                    room = limits[d] - live[d] - growth[d] - spare * later
                    if begin < forward_start and (
                        j == oldest
                        or activation[c] + most_owed[d] <= room
                        or (activation[c] <= room and _is_safe(own, c, j, oldest, following, activation, room))
                    ):
                        forward, forward_start = c * m + j, begin
                later += activation[c]
            if backward < 0 or forward < 0:
                use_forward = backward < 0
            elif following[0, first_chunk[d]] == m and patience > 0.0:
                use_forward = forward_start <= backward_start + patience * duration[backward]
            elif after_backward[d]:
                use_forward = forward_start <= backward_start
            else:
                use_forward = forward_start < backward_start
            choice[d] = forward if use_forward else backward
            choice_start[d] = forward_start if use_forward else backward_start
        d = np.argmin(choice_start)
        begin, here = choice_start[d], choice[d]
        if begin == np.inf:
            return
        stale[d] = True
        cell = here % cells
        c, j = cell // m, cell % m
        added = activation[c] if here < cells else stash[c] - activation[c]
        if head[d] < tail[d]:  # a W first?
            weight = 2 * cells + due[head[d]]
            gap = begin - free[d]
            fits = gap > 0.0 and gap >= duration[weight]
            worst = gap > 0.0 and idle[d] + gap > idle.max()
            if held[d] + added > limits[d] or fits or (worst and (fill_forward if here < cells else fill_backward)):
                order[position[d]] = weight
                position[d] += 1
                free[d] += duration[weight]
                held[d] -= stash[due[head[d]] // m]
                head[d] += 1
                continue
        if position[d] > offsets[d]:
            idle[d] += begin - free[d]
        free[d] = begin + duration[here]
        order[position[d]] = here
        position[d] += 1
        num_done[d] += 1
        remaining -= 1
        held[d] += added
        after_backward[d] = here >= cells
        if here < cells:
            following[0, c] += 1
            live[d] += activation[c]
            target = cell + m if c + 1 < num_chunks else cells + cell
        else:
            following[1, c] += 1
            live[d] -= activation[c]
            due[tail[d]] = cell
            tail[d] += 1
            target = here - m if c > 0 else -1
        if target >= 0:
            arrival[target] = free[d] + lag[here]
            stale[owner[target % cells // m]] = True
    for d in range(num_devices):
        while head[d] < tail[d]:
            order[position[d]] = 2 * cells + due[head[d]]
            position[d] += 1
            head[d] += 1
