"""Moves that change an order in several places at once: what `levelling` tries.

Passes of one stream (one kind and chunk) stay in the order of their microbatches: a move says where passes of a stream run,
`settle` says which they are. Each move notes the stretch that it touches of each device, from `low` to `high`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_zb.planning.order_moves import CHANGE, DEVICE, FIRST, FOLLOW, LAST, LIMIT, shift
from lightning_zb.planning.random_stream import below, uniform

_EARLIER, _LATER = 6.0, 10.0  # mean distances of the two passes of an exchange from the place that it is about


@njit(cache=True, nogil=True)
def shift_near(order, place, streams, ways, low, high, stream, at):
    """Exchange two passes around a place, or bring one of them to the other; False where there is no room."""
    way = ways[streams[order[at]]]
    i = at + int(np.log(uniform(stream) + 1e-12) * _EARLIER) + below(stream, 5) - 2
    j = at - int(np.log(uniform(stream) + 1e-12) * _LATER) + below(stream, 5) - 2
    if i <= way[FIRST] or j >= way[LAST] or i >= j or streams[order[i]] == streams[order[j]]:
        return False
    d = way[DEVICE]
    low[d], high[d] = min(low[d], i), max(high[d], j)
    manner = uniform(stream)
    if manner < 0.75:
        shift(order, place, j, i)
        if manner < 0.45:
            shift(order, place, i + 1, j)
    else:
        shift(order, place, i, j)
    return True


@njit(cache=True, nogil=True)
def shift_chain(order, place, streams, ways, low, high, stream, at):
    """Shift an F or B and those that follow it on its microbatch's way, each by the same number of places."""
    nm = len(order) // 3
    x = order[at]
    if x >= 2 * nm:
        x -= nm
    y = x + below(stream, 3) - 1
    if y < 0 or streams[y] != streams[x]:
        return False
    distance = int(1.0 - np.log(uniform(stream) + 1e-12) * 1.2)
    if uniform(stream) < 0.5:
        distance = -distance
    for _ in range(1 + below(stream, 5 if uniform(stream) < 0.5 else len(ways) // 3)):
        way = ways[streams[y]]
        to = place[y] + distance
        if min(place[y], to) <= way[FIRST] or to >= way[LAST]:  # the first pass of a device never moves
            return False
        d = way[DEVICE]
        low[d], high[d] = min(low[d], place[y], to), max(high[d], place[y], to)
        shift(order, place, place[y], to)
        if way[FOLLOW] == 0:
            break
        y += way[FOLLOW]
    return True


@njit(cache=True, nogil=True)
def settle(instance, order, place, streams, traits, low, high, following):
    """Give the passes of each touched stretch their microbatches in order; False where F, B, W or memory do not allow it."""
    nm = len(order) // 3
    for d in range(len(low)):
        for i in range(low[d], high[d] + 1):
            following[streams[order[i]]] = 3 * nm
        for i in range(low[d], high[d] + 1):
            s = streams[order[i]]
            following[s] = min(following[s], order[i])
        for i in range(low[d], high[d] + 1):
            s = streams[order[i]]
            order[i] = following[s]
            place[order[i]] = i
            following[s] += 1
    for d in range(len(low)):
        if high[d] < 0:
            continue
        held = 0.0
        for i in range(instance.offset[d], high[d] + 1):
            x = order[i]
            s = streams[x]
            held += traits[s, CHANGE]
            if i >= low[d] and (
                held > traits[s, LIMIT] or (x >= nm and place[x - nm] > i) or (x < 2 * nm and place[x + nm] < i)
            ):
                return False
    return True
