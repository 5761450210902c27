"""A list scheduler for any placement, costs and memory limits: always the pass that can start earliest, by a few choices.

The steady state of the first paper's heuristic (section 3.1) without its assumption of one chunk per device: devices
alternate F and B, and W fill what would be idle or make room when memory is full.

It never runs into a full memory that nothing frees. On every device the oldest microbatch that is not yet through may
use any room; every other F must leave what that one still needs there. As soon as it is through it gives back at least
what the next one needs, so the oldest microbatch of all can always advance, at any limit from `smallest_limits` on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from lightning_zb.planning.registry import Problem
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import PassTable, tabulate

_TOLERANCE = 1e-9  # of a limit: sums of bytes in floating point


@dataclass(frozen=True, slots=True)
class Choices:
    """What the list scheduler is free to do; builders try several and keep the best.

    Args:
        alternate: after a B prefer F, after an F prefer B; otherwise B always goes first.
        least_gap: idle time, in units of the W that would fill it, from which on W is put before a pass that is
            expected later.
        spare: microbatches beyond the oldest for which an F of an early chunk leaves room in later chunks.
        deepest_first: among several F that are ready the one of the last chunk.
    """

    alternate: bool = True
    least_gap: float = 1.0
    spare: float = 0.0
    deepest_first: bool = True


def list_schedule(problem: Problem, choices: Choices, table: PassTable | None = None) -> Schedule:
    """Order the passes of a problem whose limits are at least `smallest_limits`."""
    table = (
        tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches) if table is None else table
    )
    order, offsets = list_order(problem, choices, table)
    return table.decode(order, offsets)


def list_order(problem: Problem, choices: Choices, table: PassTable) -> tuple[np.ndarray, np.ndarray]:
    """As `list_schedule`, on flat arrays (`PassTable.encode`)."""
    placement, m = problem.placement, problem.num_microbatches
    activation = np.array([c.activation_bytes for c in problem.chunk_costs], dtype=np.float64)
    stash = np.array([c.weight_stash_bytes for c in problem.chunk_costs], dtype=np.float64)
    extra = np.array(smallest_limits(problem)) - np.bincount(placement.devices, activation, placement.num_devices)
    limits = np.array(problem.limits, dtype=np.float64)
    limits = limits + _TOLERANCE * np.where(np.isfinite(limits), np.abs(limits), 0.0)
    sizes = [3 * m * len(placement.chunks_of(d)) for d in range(placement.num_devices)]
    offsets = np.cumsum([0, *sizes]).astype(np.int64)
    order = np.empty(offsets[-1], dtype=np.int64)
    _list_schedule(
        offsets,
        np.array(placement.devices, dtype=np.int64),
        m,
        table.duration,
        table.lag,
        activation,
        stash,
        limits,
        extra,
        choices.alternate,
        choices.least_gap,
        choices.spare,
        choices.deepest_first,
        order,
    )
    return order, offsets


def smallest_limits(problem: Problem) -> tuple[float, ...]:
    """For each device the least activation bytes with which any order exists: one microbatch at a time.

    All F of a microbatch on a device come before its first B there, so their M_B add up; a B then turns M_B into M_W,
    which is freed at once. Running microbatches one after the other needs no more.
    """
    result = []
    for device in range(problem.placement.num_devices):
        held, peak = 0.0, 0.0
        for chunk in problem.placement.chunks_of(device):
            cost = problem.chunk_costs[chunk]
            peak = max(peak, held + cost.weight_stash_bytes)
            held += cost.activation_bytes
        result.append(max(peak, held))
    return tuple(result)


@njit(cache=True)
def _list_schedule(  # pragma: no cover (compiled)
    offsets, owner, m, duration, lag, activation, stash, limits, extra, alternate, least_gap, spare, deepest_first, order
):
    num_chunks, num_devices = len(owner), len(offsets) - 1
    cells = num_chunks * m
    unknown = np.inf
    forward_arrival = np.full((num_chunks, m), unknown)
    backward_arrival = np.full((num_chunks, m), unknown)
    forward_arrival[0, :] = 0.0
    next_forward = np.zeros(num_chunks, dtype=np.int64)
    next_backward = np.zeros(num_chunks, dtype=np.int64)
    free = np.zeros(num_devices)
    held = np.zeros(num_devices)  # all bytes
    live = np.zeros(num_devices)  # those that W cannot free: M_B of microbatches whose B is still due
    position = offsets[:-1].copy()
    waiting_weights = np.empty(cells, dtype=np.int64)  # queues of (chunk, microbatch) cells, one region per device
    regions = offsets // 3
    queue_head = regions[:-1].copy()
    queue_tail = regions[:-1].copy()
    after_backward = np.zeros(num_devices, dtype=np.bool_)
    # decisions of the devices, recomputed only where something changed
    choice_start = np.full(num_devices, np.inf)
    choice = np.full(num_devices, -1)
    stale = np.ones(num_devices, dtype=np.bool_)
    remaining = offsets[-1]
    while remaining > 0:
        for d in range(num_devices):
            if not stale[d]:
                continue
            stale[d] = False
            choice_start[d], choice[d] = np.inf, -1
            if position[d] == offsets[d + 1]:
                continue
            oldest = m
            for c in range(num_chunks):
                if owner[c] == d:
                    oldest = min(oldest, next_backward[c])
            owed = 0.0  # what the oldest microbatch still needs here
            for c in range(num_chunks):
                if owner[c] == d:
                    if next_forward[c] <= oldest:
                        owed += activation[c]
            best_forward, forward_start = -1, np.inf
            best_backward, backward_start = -1, np.inf
            later = 0.0
            for c in range(num_chunks - 1, -1, -1):
                if owner[c] != d:
                    continue
                j = next_backward[c]
                if j < next_forward[c] and backward_arrival[c, j] < unknown:
                    begin = max(free[d], backward_arrival[c, j])
                    if begin < backward_start:
                        best_backward, backward_start = c * m + j, begin
                j = next_forward[c]
                if j < m and forward_arrival[c, j] < unknown:
                    if j == oldest or live[d] + activation[c] + owed + extra[d] + spare * later <= limits[d]:
                        begin = max(free[d], forward_arrival[c, j])
                        if begin < forward_start or (begin == forward_start and not deepest_first):
                            best_forward, forward_start = c * m + j, begin
                later += activation[c]
            has_weight = queue_head[d] < queue_tail[d]
            # F or B?
            use_forward = False
            if best_forward >= 0:
                if best_backward < 0:
                    use_forward = True
                elif alternate and after_backward[d]:
                    use_forward = forward_start <= backward_start
                else:
                    use_forward = forward_start < backward_start
            begin = forward_start if use_forward else backward_start
            cell = best_forward if use_forward else best_backward
            if has_weight:
                weight = waiting_weights[queue_head[d]]
                needed = 0.0
                if cell >= 0:
                    chunk = cell // m
                    needed = activation[chunk] if use_forward else stash[chunk] - activation[chunk]
                gap = begin - free[d]
                if cell < 0 or held[d] + needed > limits[d] or (gap > 0.0 and gap >= least_gap * duration[2 * cells + weight]):
                    choice_start[d], choice[d] = free[d], 2 * cells + weight
                    continue
            if cell >= 0:
                choice_start[d] = begin
                choice[d] = cell if use_forward else cells + cell
        device = 0
        for d in range(1, num_devices):
            if choice_start[d] < choice_start[device]:
                device = d
        d, here = device, choice[device]
        cell = here % cells
        chunk, j = cell // m, cell % m
        finish = choice_start[d] + duration[here]
        order[position[d]] = here
        position[d] += 1
        remaining -= 1
        free[d] = finish
        stale[d] = True
        if here < cells:
            next_forward[chunk] += 1
            held[d] += activation[chunk]
            live[d] += activation[chunk]
            after_backward[d] = False
            if chunk + 1 < num_chunks:
                forward_arrival[chunk + 1, j] = finish + lag[here]
                stale[owner[chunk + 1]] = True
            else:
                backward_arrival[chunk, j] = finish
        elif here < 2 * cells:
            next_backward[chunk] += 1
            held[d] += stash[chunk] - activation[chunk]
            live[d] -= activation[chunk]
            waiting_weights[queue_tail[d]] = cell
            queue_tail[d] += 1
            after_backward[d] = True
            if chunk > 0:
                backward_arrival[chunk - 1, j] = finish + lag[here]
                stale[owner[chunk - 1]] = True
        else:
            queue_head[d] += 1
            held[d] -= stash[chunk]
