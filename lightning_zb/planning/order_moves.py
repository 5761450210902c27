"""An order with its times and memory, kept consistent while passes move: the working state of the annealer.

The state is a handful of arrays, which the functions take one by one (see `pass_queue` for why):

- `order`, the flat order, and `place`, where each pass stands in it;
- `start` of each pass, and `tail`, the longest way from there to an end less that device's counted start;
- `held`, the memory after each place of `order`;
- `cost`, the largest and the mean span.

What a pass is like it shares with the other microbatches of its kind and chunk, its stream: `stream` tells the row of `ways`
(whole numbers) and `traits` (seconds and bytes), see `make_streams`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_zb.planning.instance import start_times
from lightning_zb.planning.pass_queue import pop, push

# columns of `ways`: the device's first place and one past its last; the distance in passes to what a pass waits for, and to
# what waits for it, on the way of its microbatch over the chunks, 0 for none; the stream's last pass; the device
FIRST, LAST, LEAD, FOLLOW, END, DEVICE = range(6)
# columns of `traits`: duration, transfers before the pass and after it, reduction after the last, bytes added, the limit
LENGTH, LEAD_LAG, FOLLOW_LAG, REDUCTION, CHANGE, LIMIT = range(6)


@njit(cache=True, nogil=True)
def make_streams(instance):
    """The stream of each pass, and what the passes of each are like: `stream`, `ways`, `traits`."""
    n, m = len(instance.device), instance.num_microbatches
    ways, traits = np.zeros((3 * n, 6), np.int64), np.zeros((3 * n, 6))
    for s in range(3 * n):
        kind, c = s // n, s % n
        d = instance.device[c]
        ways[s, FIRST], ways[s, LAST], ways[s, DEVICE] = instance.offset[d], instance.offset[d + 1], d
        ways[s, END] = s * m + m - 1
        traits[s, LENGTH], traits[s, LIMIT] = instance.duration[kind, c], instance.limit[d]
        if kind == 0:
            traits[s, CHANGE] = instance.activation[c]
            if c > 0:
                ways[s, LEAD], traits[s, LEAD_LAG] = -m, instance.lag[0, c]
            if c < n - 1:
                ways[s, FOLLOW], traits[s, FOLLOW_LAG] = m, instance.lag[0, c + 1]
        elif kind == 1:
            traits[s, CHANGE] = instance.stash[c] - instance.activation[c]
            if c < n - 1:
                ways[s, LEAD], traits[s, LEAD_LAG] = m, instance.lag[1, c]
            if c > 0:
                ways[s, FOLLOW], traits[s, FOLLOW_LAG] = -m, instance.lag[1, c - 1]
        else:
            traits[s, CHANGE], traits[s, REDUCTION] = -instance.stash[c], instance.reduction[c]
    stream = np.empty(3 * n * m, np.int32)
    for x in range(len(stream)):
        stream[x] = x // m
    return stream, ways, traits


@njit(cache=True, inline="always")
def earliest(order, place, start, stream, ways, traits, x):
    """The start of a pass from its predecessors."""
    nm = len(order) // 3
    s = stream[x]
    begin = 0.0
    at = place[x]
    if at > ways[s, FIRST]:
        y = order[at - 1]
        begin = start[y] + traits[stream[y], LENGTH]
    if x >= nm:
        begin = max(begin, start[x - nm] + traits[stream[x - nm], LENGTH])
    way = ways[s, LEAD]
    if way != 0:
        begin = max(begin, start[x + way] + traits[stream[x + way], LENGTH] + traits[s, LEAD_LAG])
    return begin


@njit(cache=True, inline="always")
def longest(order, place, start, tail, stream, ways, traits, own_start, x):
    """The tail of a pass from its successors."""
    nm = len(order) // 3
    s = stream[x]
    at = place[x] + 1
    way = tail[order[at]] if at < ways[s, LAST] else -own_start * start[order[ways[s, FIRST]]]
    if x == ways[s, END] and traits[s, REDUCTION] > 0.0:
        way = max(way, traits[s, REDUCTION] - own_start * start[order[ways[s, FIRST]]])
    if x < 2 * nm:
        way = max(way, tail[x + nm])
        if ways[s, FOLLOW] != 0:
            way = max(way, tail[x + ways[s, FOLLOW]] + traits[s, FOLLOW_LAG])
    return way + traits[s, LENGTH]


@njit(cache=True, nogil=True)
def measure_spans(order, start, offset, stream, ways, traits, own_start, spans, cost):
    """Write spans, the largest and the mean; reductions count as if none of a device had to wait for another."""
    for d in range(len(spans)):
        y = order[offset[d + 1] - 1]
        spans[d] = start[y] + traits[stream[y], LENGTH]
    for s in range(len(ways) // 3 * 2, len(ways)):
        if traits[s, REDUCTION] > 0.0:
            d = ways[s, DEVICE]
            spans[d] = max(spans[d], start[ways[s, END]] + traits[s, LENGTH] + traits[s, REDUCTION])
    worst = total = 0.0
    for d in range(len(spans)):
        span = spans[d] - own_start * start[order[offset[d]]]
        worst = max(worst, span)
        total += span
    cost[0] = worst
    cost[1] = total / len(spans)


@njit(cache=True, nogil=True)
def rebuild(instance, order, place, start, tail, held, stream, ways, traits, own_start, spans, cost):
    """All starts, tails, places and memory from the order alone."""
    start_times(instance, order, start, spans)
    for d in range(len(spans)):
        total = 0.0
        for i in range(instance.offset[d], instance.offset[d + 1]):
            x = order[i]
            place[x] = i
            total += traits[stream[x], CHANGE]
            held[i] = total
    for x in np.argsort(-start, kind="mergesort"):
        tail[x] = longest(order, place, start, tail, stream, ways, traits, own_start, x)
    measure_spans(order, start, instance.offset, stream, ways, traits, own_start, spans, cost)


@njit(cache=True, nogil=True)
def target(order, place, held, stream, ways, traits, x, wanted):
    """The place nearest to `wanted` that the pass can take alone: streams in order, F B W in order, within memory."""
    nm = len(order) // 3
    s = stream[x]
    at = place[x]
    change, limit, first = traits[s, CHANGE], traits[s, LIMIT], ways[s, FIRST]
    to = at
    if wanted < at:
        while to > wanted:
            y = order[to - 1]
            if stream[y] == s or y + nm == x:
                break
            before = held[to - 2] if to - 2 >= first else 0.0
            if before + change > limit and change > 0.0:
                break
            to -= 1
    else:
        while to < wanted:
            y = order[to + 1]
            if stream[y] == s or x + nm == y or (change < 0.0 and held[to + 1] - change > limit):
                break
            to += 1
    return to


@njit(cache=True, nogil=True)
def shift(order, place, at, to):
    """Move the pass at one place to another, the passes between give way."""
    x = order[at]
    step = 1 if to > at else -1
    for i in range(at, to, step):
        y = order[i + step]
        order[i] = y
        place[y] = i
    order[to] = x
    place[x] = to


@njit(cache=True, inline="always")
def push_followers(start, stream, ways, keys, items, present, size, y):
    """Put what waits for a pass, apart from its successor on the device, into the heap."""
    nm = len(start) // 3
    if y < 2 * nm:
        push(keys, items, present, size, start[y + nm], y + nm)
    way = ways[stream[y], FOLLOW]
    if way != 0:
        push(keys, items, present, size, start[y + way], y + way)


@njit(cache=True, inline="always")
def push_leaders(order, place, start, stream, ways, keys, items, present, size, y):
    """Put what a pass depends on into the heap."""
    nm = len(order) // 3
    s = stream[y]
    at = place[y]
    if at > ways[s, FIRST]:
        z = order[at - 1]
        push(keys, items, present, size, -start[z], z)
    if y >= nm:
        push(keys, items, present, size, -start[y - nm], y - nm)
    way = ways[s, LEAD]
    if way != 0:
        push(keys, items, present, size, -start[y + way], y + way)


@njit(cache=True, nogil=True)
def update_tails(order, place, start, tail, stream, ways, traits, keys, items, present, size, low, high, own_start):
    """Propagate tails backwards from a moved stretch until nothing changes; latest passes first.

    Returns:
        How many passes were looked at.
    """
    looked = 0
    for i in range(low, high + 1):
        y = order[i]
        push_leaders(order, place, start, stream, ways, keys, items, present, size, y)
        push(keys, items, present, size, -start[y], y)
    while size[0] > 0:
        y = pop(keys, items, present, size)
        looked += 1
        way = longest(order, place, start, tail, stream, ways, traits, own_start, y)
        if way == tail[y]:
            continue
        tail[y] = way
        push_leaders(order, place, start, stream, ways, keys, items, present, size, y)
    return looked
