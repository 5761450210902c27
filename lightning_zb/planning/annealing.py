"""Cool simulated annealing on the order of passes, with incremental evaluation.

A move shifts one pass along its device. Every pass keeps its start (the longest way to it) and its tail (the longest way
from its start to a device's end, less that device's own start), so the cost is the largest start + tail, and most bad
moves are refused after a look at the passes between the old and the new place. What is not refused is propagated until
nothing changes, so a move that matters only locally costs little whatever the number of microbatches. A reduction of
gradients is a way to the device's end too.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_zb.planning.instance import Instance, span_cost, start_times
from lightning_zb.planning.order_state import (
    State,
    earliest,
    longest,
    measure_spans,
    memory_change,
    push_followers,
    rebuild,
    shift,
    target,
    update_tails,
)
from lightning_zb.planning.pass_heap import Heap, clear, pop, push
from lightning_zb.planning.random_stream import below, uniform

_MOVE_WORK = 4  # choosing a pass and a place, compared with looking at one pass in a heap


def positive(instance: Instance) -> Instance:
    """The same problem with a tiny duration in place of zero."""
    tiny = 1e-9 * max(float(instance.duration.max()), 1e-12)
    return instance._replace(duration=np.maximum(instance.duration, tiny))


@njit(cache=True, nogil=True)
def anneal(instance, order, stream, budget, hot, cold, guide, reach, criticality, own_start):
    """Improve an order that runs and fits.

    Args:
        instance: with positive durations only (see `positive`), so that no cycle of passes is free of charge.
        order: flat order; holds the best one found afterwards.
        stream: state of the random stream, advanced.
        budget: work to spend, counted in passes looked at; a move costs at least `_MOVE_WORK`.
        hot: temperature at the beginning, seconds.
        cold: at the end.
        guide: weight of the mean span beside the largest: tells equal plans apart.
        reach: mean distance of a move, in passes.
        criticality: share of the moves that start at a pass on a longest way.
        own_start: 1 for step_time, 0 for makespan.

    Returns:
        The best cost.
    """
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    total = 3 * nm
    num_devices = len(instance.chunk_start) - 1
    tiny = 1e-9 * instance.duration.max()
    state = State(
        order,
        np.empty(total, np.int32),
        np.empty(total),
        np.empty(total),
        np.empty(total),
        np.empty(2),
    )
    heap = Heap(np.empty(total), np.empty(total, np.int32), np.zeros(total, np.bool_), np.zeros(1, np.int64))
    changed = np.empty(8 * total, np.int32)  # what a move changed, and the value before
    before = np.empty(8 * total)
    rebuild(instance, state, own_start)
    best_order = order.copy()
    best = state.cost[0]
    best_mean = state.cost[1]
    temperature = hot
    work = checked = 0
    while work < budget:
        work += _MOVE_WORK
        if work >= checked:
            temperature = hot * (cold / hot) ** (work / budget)
            checked = work + budget // 1000
        x = below(stream, total)
        if uniform(stream) < criticality:
            for _ in range(4 * num_devices):
                if state.start[x] + state.tail[x] >= state.cost[0] - temperature:
                    break
                x = below(stream, total)
        at = state.place[x]
        d = instance.device[(x % nm) // m]
        distance = 1
        if uniform(stream) > 0.3:
            distance -= int(np.log(uniform(stream) + 1e-12) * reach * (2.0 if x >= 2 * nm else 0.7))
        wanted = at - distance if uniform(stream) < 0.55 else at + distance
        wanted = min(max(wanted, instance.offset[d]), instance.offset[d + 1] - 1)
        to = target(instance, state, x, wanted)
        if to == at:
            continue
        allowed = state.cost[0] + guide * state.cost[1] - temperature * np.log(uniform(stream) + 1e-300) + tiny * 1e-3
        ceiling = allowed - guide * state.cost[1] * (1.0 - 1e-3)
        low, high = min(at, to), max(at, to)
        shift(state, at, to)
        # tails of the passes between, latest first: exact unless a way leaves the device and comes back
        for i in range(high, low - 1, -1):
            y = state.order[i]
            before[i - low] = state.tail[y]
            changed[i - low] = y
            state.tail[y] = longest(instance, state, y, own_start)
        kept = high - low + 1
        count = kept
        work += kept
        refused = False
        for i in range(low, high + 1):
            y = state.order[i]
            begin = earliest(instance, state, y)
            if begin + state.tail[y] > ceiling:
                refused = True
                break
            if begin != state.start[y]:
                changed[count], before[count] = y, state.start[y]
                count += 1
                state.start[y] = begin
        if not refused:
            # whatever follows a changed pass, in the order of the old starts
            if high + 1 < instance.offset[d + 1]:
                y = state.order[high + 1]
                push(heap, state.start[y], y)
            for i in range(kept, count):
                push_followers(instance, state, heap, changed[i])
            while heap.size[0] > 0:
                y = pop(heap)
                work += 1
                begin = earliest(instance, state, y)
                if begin == state.start[y]:
                    continue
                if begin + state.tail[y] > ceiling or count + 1 >= len(changed):
                    refused = True
                    break
                changed[count], before[count] = y, state.start[y]
                count += 1
                state.start[y] = begin
                z = state.place[y] + 1
                if z < instance.offset[instance.device[(y % nm) // m] + 1]:
                    push(heap, state.start[state.order[z]], state.order[z])
                push_followers(instance, state, heap, y)
        if not refused:
            worst, mean = state.cost[0], state.cost[1]
            measure_spans(instance, state, own_start)
            if state.cost[0] + guide * state.cost[1] > allowed:
                state.cost[0], state.cost[1] = worst, mean
                refused = True
        if refused:
            clear(heap)
            for i in range(count - 1, kept - 1, -1):
                state.start[changed[i]] = before[i]
            for i in range(kept):
                state.tail[changed[i]] = before[i]
            shift(state, to, at)
            continue
        held = state.held[low - 1] if low > instance.offset[d] else 0.0
        for i in range(low, high + 1):
            held += memory_change(instance, state.order[i])
            state.held[i] = held
        first_moved = False
        if own_start > 0.0:
            for i in range(kept, count):
                y = changed[i]
                if state.place[y] == instance.offset[instance.device[(y % nm) // m]]:
                    first_moved = True
                    break
            first_moved = first_moved or low == instance.offset[d]
        if first_moved:  # every tail to that device's end counts from another start
            rebuild(instance, state, own_start)
            work += 3 * total
        else:
            work += update_tails(instance, state, heap, low, high, own_start)
        if state.cost[0] < best - tiny or (state.cost[0] <= best and state.cost[1] < best_mean):
            best, best_mean = state.cost[0], state.cost[1]
            best_order[:] = state.order
    order[:] = best_order
    start = np.empty(total)
    ends = np.empty(num_devices)
    start_times(instance, order, start, ends)
    return span_cost(instance, order, start, ends, own_start)
