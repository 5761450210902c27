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
from lightning_zb.planning.order_moves import (
    CHANGE,
    FIRST,
    LAST,
    earliest,
    longest,
    make_streams,
    measure_spans,
    push_followers,
    rebuild,
    shift,
    target,
    update_tails,
)
from lightning_zb.planning.pass_queue import clear, empty_queue, pop, push
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
    total = len(order)
    nm = total // 3
    num_devices = len(instance.chunk_start) - 1
    tiny = 1e-9 * instance.duration.max()
    streams, ways, traits = make_streams(instance)
    offset = instance.offset
    place, start, tail, held = np.empty(total, np.int32), np.empty(total), np.empty(total), np.empty(total)
    spans, cost = np.empty(num_devices), np.empty(2)
    keys, items, present, size = empty_queue(total)
    changed = np.empty(8 * total, np.int32)  # what a move changed, and the value before
    before = np.empty(8 * total)
    rebuild(instance, order, place, start, tail, held, streams, ways, traits, own_start, spans, cost)
    best_order = order.copy()
    best = cost[0]
    best_mean = cost[1]
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
                if start[x] + tail[x] >= cost[0] - temperature:
                    break
                x = below(stream, total)
        at = place[x]
        first, last = ways[streams[x], FIRST], ways[streams[x], LAST]
        distance = 1
        if uniform(stream) > 0.3:
            distance -= int(np.log(uniform(stream) + 1e-12) * reach * (2.0 if x >= 2 * nm else 0.7))
        wanted = at - distance if uniform(stream) < 0.55 else at + distance
        wanted = min(max(wanted, first), last - 1)
        to = target(order, place, held, streams, ways, traits, x, wanted)
        if to == at:
            continue
        allowed = cost[0] + guide * cost[1] - temperature * np.log(uniform(stream) + 1e-300) + tiny * 1e-3
        ceiling = allowed - guide * cost[1] * (1.0 - 1e-3)
        low, high = min(at, to), max(at, to)
        shift(order, place, at, to)
        # tails of the passes between, latest first: exact unless a way leaves the device and comes back
        for i in range(high, low - 1, -1):
            y = order[i]
            before[i - low] = tail[y]
            changed[i - low] = y
            tail[y] = longest(order, place, start, tail, streams, ways, traits, own_start, y)
        kept = high - low + 1
        count = kept
        work += kept
        refused = False
        for i in range(low, high + 1):
            y = order[i]
            begin = earliest(order, place, start, streams, ways, traits, y)
            if begin + tail[y] > ceiling:
                refused = True
                break
            if begin != start[y]:
                changed[count], before[count] = y, start[y]
                count += 1
                start[y] = begin
        if not refused:
            # whatever follows a changed pass, in the order of the old starts
            if high + 1 < last:
                y = order[high + 1]
                push(keys, items, present, size, start[y], y)
            for i in range(kept, count):
                push_followers(start, streams, ways, keys, items, present, size, changed[i])
            while size[0] > 0:
                y = pop(keys, items, present, size)
                work += 1
                begin = earliest(order, place, start, streams, ways, traits, y)
                if begin == start[y]:
                    continue
                if begin + tail[y] > ceiling or count + 1 >= len(changed):
                    refused = True
                    break
                changed[count], before[count] = y, start[y]
                count += 1
                start[y] = begin
                after = place[y] + 1
                if after < ways[streams[y], LAST]:
                    z = order[after]
                    push(keys, items, present, size, start[z], z)
                push_followers(start, streams, ways, keys, items, present, size, y)
        if not refused:
            worst, mean = cost[0], cost[1]
            measure_spans(order, start, offset, streams, ways, traits, own_start, spans, cost)
            if cost[0] + guide * cost[1] > allowed:
                cost[0], cost[1] = worst, mean
                refused = True
        if refused:
            clear(items, present, size)
            for i in range(count - 1, kept - 1, -1):
                start[changed[i]] = before[i]
            for i in range(kept):
                tail[changed[i]] = before[i]
            shift(order, place, to, at)
            continue
        bytes_held = held[low - 1] if low > first else 0.0
        for i in range(low, high + 1):
            bytes_held += traits[streams[order[i]], CHANGE]
            held[i] = bytes_held
        first_moved = False
        if own_start > 0.0:
            first_moved = low == first
            for i in range(kept, count):
                y = changed[i]
                first_moved = first_moved or place[y] == ways[streams[y], FIRST]
        if first_moved:  # every tail to that device's end counts from another start
            rebuild(instance, order, place, start, tail, held, streams, ways, traits, own_start, spans, cost)
            work += 3 * total
        else:
            work += update_tails(
                order, place, start, tail, streams, ways, traits, keys, items, present, size, low, high, own_start
            )
        if cost[0] < best - tiny or (cost[0] <= best and cost[1] < best_mean):
            best, best_mean = cost[0], cost[1]
            best_order[:] = order
    order[:] = best_order
    start_times(instance, order, start, spans)
    return span_cost(instance, order, start, spans, own_start)
