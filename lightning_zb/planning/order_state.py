"""An order with its times and memory, kept consistent while passes move: the working state of the annealer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_zb.planning.instance import start_times
from lightning_zb.planning.pass_heap import pop, push


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
def earliest(instance, state, x):
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
def longest(instance, state, x, own_start):
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
    if kind == 2 and x % m == m - 1 and instance.reduction[c] > 0.0:
        tail = max(tail, instance.reduction[c] - own_start * state.start[state.order[instance.offset[d]]])
    if kind < 2:
        tail = max(tail, state.tail[x + nm])
        if kind == 0 and c < n - 1:
            tail = max(tail, state.tail[x + m] + instance.lag[0, c + 1])
        if kind == 1 and c > 0:
            tail = max(tail, state.tail[x - m] + instance.lag[1, c - 1])
    return tail + instance.duration[kind, c]


@njit(cache=True, nogil=True)
def measure_spans(instance, state, own_start):
    """Write the largest and the mean span; reductions count as if none of a device had to wait for another."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    num_devices = len(instance.chunk_start) - 1
    worst = total = 0.0
    for d in range(num_devices):
        y = state.order[instance.offset[d + 1] - 1]
        span = state.start[y] + instance.duration[y // nm, (y % nm) // m]
        for i in range(instance.chunk_start[d], instance.chunk_start[d + 1]):
            c = instance.chunk_list[i]
            if instance.reduction[c] > 0.0:
                span = max(span, state.start[2 * nm + c * m + m - 1] + instance.duration[2, c] + instance.reduction[c])
        span -= own_start * state.start[state.order[instance.offset[d]]]
        worst = max(worst, span)
        total += span
    state.cost[0] = worst
    state.cost[1] = total / num_devices


@njit(cache=True, nogil=True)
def rebuild(instance, state, own_start):
    """All starts, tails, places and memory from the order alone."""
    ends = np.empty(len(instance.chunk_start) - 1)
    start_times(instance, state.order, state.start, ends)
    for d in range(len(ends)):
        held = 0.0
        for i in range(instance.offset[d], instance.offset[d + 1]):
            x = state.order[i]
            state.place[x] = i
            held += memory_change(instance, x)
            state.held[i] = held
    backwards = np.argsort(-state.start, kind="mergesort")
    for x in backwards:
        state.tail[x] = longest(instance, state, x, own_start)
    measure_spans(instance, state, own_start)


@njit(cache=True, inline="always")
def memory_change(instance, x):
    m = instance.num_microbatches
    nm = len(instance.device) * m
    kind = x // nm
    c = (x - kind * nm) // m
    if kind == 0:
        return instance.activation[c]
    if kind == 1:
        return instance.stash[c] - instance.activation[c]
    return -instance.stash[c]


@njit(cache=True, nogil=True)
def target(instance, state, x, wanted):
    """The place nearest to `wanted` that the pass can take alone: streams in order, F B W in order, within memory."""
    m = instance.num_microbatches
    nm = len(instance.device) * m
    stream = x // m
    at = state.place[x]
    change = memory_change(instance, x)
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


@njit(cache=True, nogil=True)
def shift(state, at, to):
    """Move the pass at one place to another, the passes between give way."""
    x = state.order[at]
    step = 1 if to > at else -1
    for i in range(at, to, step):
        y = state.order[i + step]
        state.order[i] = y
        state.place[y] = i
    state.order[to] = x
    state.place[x] = to


@njit(cache=True, inline="always")
def push_followers(instance, state, heap, y):
    """Put what waits for a pass, apart from its successor on the device, into the heap."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = y // nm
    c = (y - kind * nm) // m
    if kind < 2:
        push(heap, state.start[y + nm], y + nm)
    if kind == 0 and c < n - 1:
        push(heap, state.start[y + m], y + m)
    elif kind == 1 and c > 0:
        push(heap, state.start[y - m], y - m)


@njit(cache=True, nogil=True)
def update_tails(instance, state, heap, low, high, own_start):
    """Propagate tails backwards from a moved stretch until nothing changes; latest passes first.

    Returns:
        How many passes were looked at.
    """
    looked = 0
    for i in range(low, high + 1):
        y = state.order[i]
        push_leaders(instance, state, heap, y)
        push(heap, -state.start[y], y)
    while heap.size[0] > 0:
        y = pop(heap)
        looked += 1
        tail = longest(instance, state, y, own_start)
        if tail == state.tail[y]:
            continue
        state.tail[y] = tail
        push_leaders(instance, state, heap, y)
    return looked


@njit(cache=True, inline="always")
def push_leaders(instance, state, heap, y):
    """Put what a pass depends on into the heap."""
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    kind = y // nm
    c = (y - kind * nm) // m
    at = state.place[y]
    if at > instance.offset[instance.device[c]]:
        z = state.order[at - 1]
        push(heap, -state.start[z], z)
    if kind > 0:
        push(heap, -state.start[y - nm], y - nm)
    if kind == 0 and c > 0:
        push(heap, -state.start[y - m], y - m)
    elif kind == 1 and c < n - 1:
        push(heap, -state.start[y + m], y + m)
