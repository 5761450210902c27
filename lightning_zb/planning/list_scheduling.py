"""List scheduling under a memory limit: each device in turn takes its most urgent pass.

The urgency of a pass is the time at which an ideal periodic schedule would run it: an offset for its kind and chunk
plus one period for each microbatch before it. Offsets are few numbers (a base and a slope over the devices for each
kind and level, a level being the how-manieth chunk of its device), so they can be tuned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Clock(NamedTuple):
    """The times by which a list scheduler orders passes; they need not be the true ones.

    Small integers keep the passes of different devices aligned, which is worth more than exact times: the order is
    scored on true times afterwards.

    Args:
        duration: F, B, W of each chunk, shape (3, chunks).
        edge_lag: transfers of the microbatches in warm-up and cool-down, shape (2, chunks).
        middle_lag: transfers of all others: more than the true ones leaves room for jitter in the steady state.
        first_middle: the first microbatch with `middle_lag`.
        last_middle: one past the last.
        warm_up_lag: least transfers before F as long as a device has run no B, shape (chunks,).
    """

    duration: np.ndarray
    edge_lag: np.ndarray
    middle_lag: np.ndarray
    first_middle: int
    last_middle: int
    warm_up_lag: np.ndarray


@njit(cache=True, nogil=True)
def list_schedule(instance, clock, urgency, period, patience, reserve, order):
    """Build an order.

    A forward is admitted only while memory remains for the later chunks of its microbatch on the same device; the oldest
    microbatch there may use any room, so that it can always go on.

    Args:
        urgency: offset of each kind and chunk in clock time, shape (3, chunks); smaller runs earlier.
        period: clock time from one microbatch to the next.
        patience: what a unit of waiting for a pass that is about to arrive costs in urgency.
        reserve: how many units of each later chunk are kept free.
        order: flat order, written.

    Returns:
        True when all passes found a place.
    """
    num_devices = len(instance.chunk_start) - 1
    n, m = len(instance.device), instance.num_microbatches
    nm = n * m
    end = np.full(2 * nm, -1.0)
    following = np.zeros((3, n), np.int32)  # the next microbatch of each kind and chunk
    held = np.zeros(num_devices)
    free = np.zeros(num_devices)
    wake = np.zeros(num_devices)  # when a device decides next; infinite while it sleeps
    begun = np.zeros(num_devices, np.bool_)  # has run a B
    position = instance.offset[:-1].copy()
    headroom = np.zeros(num_devices)  # a checkpointed chunk's B needs more memory than it frees
    for c in range(n):
        d = instance.device[c]
        headroom[d] = max(headroom[d], instance.stash[c] - instance.activation[c])
    done = 0
    while True:
        d = 0
        now = wake[0]
        for e in range(1, num_devices):
            if wake[e] < now:
                now = wake[e]
                d = e
        if now == np.inf:
            break
        begin = max(now, free[d])
        best = np.inf
        best_kind = best_chunk = -1
        best_begin = 0.0
        low, high = instance.chunk_start[d], instance.chunk_start[d + 1]
        oldest = following[1, instance.chunk_list[low]]  # all microbatches before it are through with F and B here
        for i in range(high - 1, low - 1, -1):
            c = instance.chunk_list[i]
            j = following[0, c]
            if j < m and (c == 0 or end[(c - 1) * m + j] >= 0.0):
                later = 0.0
                for i2 in range(i + 1, high):
                    c2 = instance.chunk_list[i2]
                    if following[0, c2] <= j:
                        later += instance.activation[c2]
                kept = 0.0 if j == oldest else reserve * later + headroom[d]
                if held[d] + instance.activation[c] + kept <= instance.limit[d]:
                    arrival = 0.0
                    if c > 0:
                        middle = clock.first_middle <= j < clock.last_middle
                        lag = clock.middle_lag[0, c] if middle else clock.edge_lag[0, c]
                        if not begun[d]:
                            lag = max(lag, clock.warm_up_lag[c])
                        arrival = end[(c - 1) * m + j] + lag
                    wait = max(0.0, arrival - begin)
                    score = urgency[0, c] + j * period + patience * wait
                    if score < best:
                        best, best_kind, best_chunk, best_begin = score, 0, c, begin + wait
            j = following[1, c]
            admitted = held[d] + instance.stash[c] - instance.activation[c] <= instance.limit[d]
            if admitted and j < following[0, c] and (c == n - 1 or end[nm + (c + 1) * m + j] >= 0.0):
                arrival = 0.0
                if c < n - 1:
                    middle = clock.first_middle <= j < clock.last_middle
                    arrival = end[nm + (c + 1) * m + j] + (clock.middle_lag[1, c] if middle else clock.edge_lag[1, c])
                wait = max(0.0, arrival - begin)
                score = urgency[1, c] + j * period + patience * wait
                if score < best:
                    best, best_kind, best_chunk, best_begin = score, 1, c, begin + wait
            j = following[2, c]
            if j < following[1, c]:
                score = urgency[2, c] + j * period
                if score < best:
                    best, best_kind, best_chunk, best_begin = score, 2, c, begin
        if best_kind < 0:
            wake[d] = np.inf
            continue
        if best_begin > now:  # wait, and think again if something else arrives before
            wake[d] = best_begin
            continue
        j = following[best_kind, best_chunk]
        order[position[d]] = (best_kind * n + best_chunk) * m + j
        position[d] += 1
        following[best_kind, best_chunk] += 1
        done += 1
        free[d] = best_begin + clock.duration[best_kind, best_chunk]
        wake[d] = free[d]
        if best_kind == 0:
            end[best_chunk * m + j] = free[d]
            held[d] += instance.activation[best_chunk]
            neighbour = best_chunk + 1 if best_chunk < n - 1 else -1
        elif best_kind == 1:
            begun[d] = True
            end[nm + best_chunk * m + j] = free[d]
            held[d] += instance.stash[best_chunk] - instance.activation[best_chunk]
            neighbour = best_chunk - 1
        else:
            held[d] -= instance.stash[best_chunk]
            neighbour = -1
        if neighbour >= 0:
            other = instance.device[neighbour]
            if other != d:
                wake[other] = min(wake[other], max(now, free[other]))
    return done == 3 * nm
