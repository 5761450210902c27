"""Cool simulated annealing on the order of passes, with incremental evaluation.

A move shifts one pass along its device. Every pass keeps its start (the longest way to it) and its tail (the longest way
from its start to a device's end, less that device's own start), so the cost is the largest start + tail, and most bad
moves are refused after a look at the passes between the old and the new place. What is not refused is propagated until
nothing changes, so a move that matters only locally costs little whatever the number of microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_zb.planning.instance import Instance, span_cost, start_times
from lightning_zb.planning.random_stream import below, uniform

_MOVE_WORK = 4  # choosing a pass and a place, compared with looking at one pass in a heap


def positive(instance: Instance) -> Instance:
    """The same problem with a tiny duration in place of zero."""
    tiny = 1e-9 * max(float(instance.duration.max()), 1e-12)
    return instance._replace(duration=np.maximum(instance.duration, tiny))


class Heap(NamedTuple):
    """A binary heap of passes by key, each at most once.

    Args:
        keys: shape (passes,).
        items: shape (passes,).
        present: whether a pass is in the heap, shape (passes,).
        size: shape (1,).
    """

    keys: np.ndarray
    items: np.ndarray
    present: np.ndarray
    size: np.ndarray


@njit(cache=True, inline="always")
def _push(heap, key, item):
    if heap.present[item]:
        return
    heap.present[item] = True
    i = heap.size[0]
    heap.size[0] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap.keys[parent] <= key:
            break
        heap.keys[i] = heap.keys[parent]
        heap.items[i] = heap.items[parent]
        i = parent
    heap.keys[i] = key
    heap.items[i] = item


@njit(cache=True, inline="always")
def _pop(heap):
    item = heap.items[0]
    heap.present[item] = False
    last = heap.size[0] - 1
    heap.size[0] = last
    if last > 0:
        key, moved = heap.keys[last], heap.items[last]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= last:
                break
            if child + 1 < last and heap.keys[child + 1] < heap.keys[child]:
                child += 1
            if heap.keys[child] >= key:
                break
            heap.keys[i] = heap.keys[child]
            heap.items[i] = heap.items[child]
            i = child
        heap.keys[i] = key
        heap.items[i] = moved
    return item


@njit(cache=True)
def _clear(heap):
    for i in range(heap.size[0]):
        heap.present[heap.items[i]] = False
    heap.size[0] = 0


class State(NamedTuple):
    """An order with its times, kept consistent by the moves. `cost` holds the largest span and the mean span.

    Args:
        order: flat order.
        place: where each pass stands in `order`.
        start: start of each pass.
        tail: longest way from the start of each pass to an end less that device's counted start.
        held: memory after each place of `order`.
        cost: largest span, mean span; shape (2,).
    """

    order: np.ndarray
    place: np.ndarray
    start: np.ndarray
    tail: np.ndarray
    held: np.ndarray
    cost: np.ndarray


@njit(cache=True, inline="always")
def _earliest(instance, state, x):
    """The start of a pass from its predecessors."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = x // nm
    c = (x - kind * nm) // m
    begin = 0.0
    at = state.place[x]
    if at > instance.offset[instance.device[c]]:
        y = state.order[at - 1]
        begin = state.start[y] + instance.duration[y // nm, (y % nm) // m]
    if kind == 0:
        if c > 0:
            begin = max(begin, state.start[x - m] + instance.duration[0, c - 1] + instance.lag[0, c])
    else:
        begin = max(begin, state.start[x - nm] + instance.duration[kind - 1, c])
        if kind == 1 and c < n - 1:
            begin = max(begin, state.start[x + m] + instance.duration[1, c + 1] + instance.lag[1, c])
    return begin


@njit(cache=True, inline="always")
def _longest(instance, state, x, own_start):
    """The tail of a pass from its successors."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = x // nm
    c = (x - kind * nm) // m
    d = instance.device[c]
    at = state.place[x] + 1
    if at < instance.offset[d + 1]:
        tail = state.tail[state.order[at]]
    else:
        tail = -own_start * state.start[state.order[instance.offset[d]]]
    if kind < 2:
        tail = max(tail, state.tail[x + nm])
        if kind == 0 and c < n - 1:
            tail = max(tail, state.tail[x + m] + instance.lag[0, c + 1])
        if kind == 1 and c > 0:
            tail = max(tail, state.tail[x - m] + instance.lag[1, c - 1])
    return tail + instance.duration[kind, c]


@njit(cache=True)
def _measure(instance, state, own_start):
    """Write the largest and the mean span."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    num_devices = len(instance.chunk_start) - 1
    worst = total = 0.0
    for d in range(num_devices):
        y = state.order[instance.offset[d + 1] - 1]
        span = state.start[y] + instance.duration[y // nm, (y % nm) // m]
        span -= own_start * state.start[state.order[instance.offset[d]]]
        worst = max(worst, span)
        total += span
    state.cost[0] = worst
    state.cost[1] = total / num_devices


@njit(cache=True)
def _rebuild(instance, state, own_start):
    """All starts, tails, places and memory from the order alone."""
    ends = np.empty(len(instance.chunk_start) - 1)
    start_times(instance, state.order, state.start, ends)
    for d in range(len(ends)):
        held = 0.0
        for i in range(instance.offset[d], instance.offset[d + 1]):
            x = state.order[i]
            state.place[x] = i
            held += _memory_change(instance, x)
            state.held[i] = held
    backwards = np.argsort(-state.start, kind="mergesort")
    for x in backwards:
        state.tail[x] = _longest(instance, state, x, own_start)
    _measure(instance, state, own_start)


@njit(cache=True, inline="always")
def _memory_change(instance, x):
    m = instance.num_microbatches
    nm = len(instance.device) * m
    kind = x // nm
    c = (x - kind * nm) // m
    if kind == 0:
        return instance.activation[c]
    if kind == 1:
        return instance.stash[c] - instance.activation[c]
    return -instance.stash[c]


@njit(cache=True)
def _target(instance, state, x, wanted):
    """The place nearest to `wanted` that the pass can take alone: streams in order, F B W in order, within memory."""
    m = instance.num_microbatches
    nm = len(instance.device) * m
    stream = x // m
    at = state.place[x]
    change = _memory_change(instance, x)
    d = instance.device[stream % len(instance.device)]
    limit, first = instance.limit[d], instance.offset[d]
    to = at
    if wanted < at:
        while to > wanted:
            y = state.order[to - 1]
            if y // m == stream or y + nm == x:
                break
            held = state.held[to - 2] if to - 2 >= first else 0.0
            if held + change > limit and change > 0.0:
                break
            to -= 1
    else:
        while to < wanted:
            y = state.order[to + 1]
            if y // m == stream or x + nm == y or (change < 0.0 and state.held[to + 1] - change > limit):
                break
            to += 1
    return to


@njit(cache=True)
def _shift(state, at, to):
    """Move the pass at one place to another, the passes between give way."""
    x = state.order[at]
    step = 1 if to > at else -1
    for i in range(at, to, step):
        y = state.order[i + step]
        state.order[i] = y
        state.place[y] = i
    state.order[to] = x
    state.place[x] = to


@njit(cache=True)
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
    _rebuild(instance, state, own_start)
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
        to = _target(instance, state, x, wanted)
        if to == at:
            continue
        allowed = state.cost[0] + guide * state.cost[1] - temperature * np.log(uniform(stream) + 1e-300) + tiny * 1e-3
        ceiling = allowed - guide * state.cost[1] * (1.0 - 1e-3)
        low, high = min(at, to), max(at, to)
        _shift(state, at, to)
        # tails of the passes between, latest first: exact unless a way leaves the device and comes back
        for i in range(high, low - 1, -1):
            y = state.order[i]
            before[i - low] = state.tail[y]
            changed[i - low] = y
            state.tail[y] = _longest(instance, state, y, own_start)
        kept = high - low + 1
        count = kept
        work += kept
        refused = False
        for i in range(low, high + 1):
            y = state.order[i]
            begin = _earliest(instance, state, y)
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
                _push(heap, state.start[y], y)
            for i in range(kept, count):
                _push_followers(instance, state, heap, changed[i])
            while heap.size[0] > 0:
                y = _pop(heap)
                work += 1
                begin = _earliest(instance, state, y)
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
                    _push(heap, state.start[state.order[z]], state.order[z])
                _push_followers(instance, state, heap, y)
        if not refused:
            worst, mean = state.cost[0], state.cost[1]
            _measure(instance, state, own_start)
            if state.cost[0] + guide * state.cost[1] > allowed:
                state.cost[0], state.cost[1] = worst, mean
                refused = True
        if refused:
            _clear(heap)
            for i in range(count - 1, kept - 1, -1):
                state.start[changed[i]] = before[i]
            for i in range(kept):
                state.tail[changed[i]] = before[i]
            _shift(state, to, at)
            continue
        held = state.held[low - 1] if low > instance.offset[d] else 0.0
        for i in range(low, high + 1):
            held += _memory_change(instance, state.order[i])
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
            _rebuild(instance, state, own_start)
            work += 3 * total
        else:
            work += _update_tails(instance, state, heap, low, high, own_start)
        if state.cost[0] < best - tiny or (state.cost[0] <= best and state.cost[1] < best_mean):
            best, best_mean = state.cost[0], state.cost[1]
            best_order[:] = state.order
    order[:] = best_order
    start = np.empty(total)
    ends = np.empty(num_devices)
    start_times(instance, order, start, ends)
    return span_cost(instance, order, start, ends, own_start)


@njit(cache=True, inline="always")
def _push_followers(instance, state, heap, y):
    """Put what waits for a pass, apart from its successor on the device, into the heap."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = y // nm
    c = (y - kind * nm) // m
    if kind < 2:
        _push(heap, state.start[y + nm], y + nm)
    if kind == 0 and c < n - 1:
        _push(heap, state.start[y + m], y + m)
    elif kind == 1 and c > 0:
        _push(heap, state.start[y - m], y - m)


@njit(cache=True)
def _update_tails(instance, state, heap, low, high, own_start):
    """Propagate tails backwards from a moved stretch until nothing changes; latest passes first.

    Returns:
        How many passes were looked at.
    """
    looked = 0
    for i in range(low, high + 1):
        y = state.order[i]
        _push_leaders(instance, state, heap, y)
        _push(heap, -state.start[y], y)
    while heap.size[0] > 0:
        y = _pop(heap)
        looked += 1
        tail = _longest(instance, state, y, own_start)
        if tail == state.tail[y]:
            continue
        state.tail[y] = tail
        _push_leaders(instance, state, heap, y)
    return looked


@njit(cache=True, inline="always")
def _push_leaders(instance, state, heap, y):
    """Put what a pass depends on into the heap."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = y // nm
    c = (y - kind * nm) // m
    at = state.place[y]
    if at > instance.offset[instance.device[c]]:
        z = state.order[at - 1]
        _push(heap, -state.start[z], z)
    if kind > 0:
        _push(heap, -state.start[y - nm], y - nm)
    if kind == 0 and c > 0:
        _push(heap, -state.start[y - m], y - m)
    elif kind == 1 and c < n - 1:
        _push(heap, -state.start[y + m], y + m)
