"""The arithmetic of the lower bounds, compiled: searches ask for thousands. What each bound argues is told in `bounds`."""

from __future__ import annotations

import numpy as np
from numba import njit

NAMES = ("work", "chain", "memory", "path", "warm-up", "cool-down", "relay")
_WORK, _CHAIN, _MEMORY, _PATH, _WARM_UP, _COOL_DOWN, _RELAY = range(7)


@njit(cache=True, nogil=True)
def strongest_bounds(instance, fuses, from_step_start):
    """The strongest bound of each name, over all devices.

    Args:
        instance: limits must be feasible.
        fuses: whether a W may follow its B without holding memory in between, as within a BW.
        from_step_start: count from the start of the step's first pass instead of the device's own.

    Returns:
        Seconds and the device argued over, in the order of `NAMES`; -1 seconds where a bound says nothing.
    """
    n, m, num_devices = len(instance.device), instance.num_microbatches, len(instance.limit)
    forward, backward, weight = instance.duration[0], instance.duration[1], instance.duration[2]
    # the way of one microbatch: up[c] from the start of F(0) to that of F(c), turn to the end of the last F, down[c] from
    # there to the start of B(c)
    up, down = np.zeros(n), np.zeros(n)
    for c in range(1, n):
        up[c] = up[c - 1] + forward[c - 1] + instance.lag[0, c]
    for c in range(n - 2, -1, -1):
        down[c] = down[c + 1] + backward[c + 1] + instance.lag[1, c]
    turn = up[n - 1] + forward[n - 1]

    first, last = np.zeros(num_devices, np.int64), np.zeros(num_devices, np.int64)
    work = np.zeros(num_devices)
    most_forward = np.zeros(num_devices)  # the most seconds of F before the device's first B
    most_backward = np.zeros(num_devices)  # the most seconds of B and W after its last F
    most_weight = np.zeros(num_devices)  # the most seconds of W after its last B
    holds_all = np.zeros(num_devices, np.bool_)  # whether all F could come before the first B
    for d in range(num_devices):
        own = instance.chunk_list[instance.chunk_start[d] : instance.chunk_start[d + 1]]
        activation, stash, limit = instance.activation[own], instance.stash[own], instance.limit[d]
        first[d], last[d] = own[0], own[-1]
        work[d] = m * (forward[own].sum() + backward[own].sum() + weight[own].sum())
        most_forward[d] = _fill(limit, activation, forward[own], m)
        most_backward[d] = _fill_backward(limit, activation, stash, backward[own] + weight[own], weight[own], m)
        # within a BW as the last backward, one W holds nothing
        most_weight[d] = _fill(limit, stash, weight[own], m) + (weight[own].max() if fuses else 0.0)
        holds_all[d] = m * activation.sum() <= limit

    best, argued = np.full(len(NAMES), -1.0), np.zeros(len(NAMES), np.int64)
    for d in range(num_devices):
        before = up[first[d]] if from_step_start else 0.0
        own = instance.chunk_list[instance.chunk_start[d] : instance.chunk_start[d + 1]]
        before += instance.reduction[own].min()  # after its last pass
        end_of_last = backward[first[d]] + weight[first[d]]
        _raise(best, argued, _WORK, before + work[d], d)
        _raise(best, argued, _CHAIN, before + turn - up[first[d]] + down[first[d]] + end_of_last, d)
        limit = instance.limit[d]
        if 0.0 < limit < np.inf:
            occupied = 0.0
            for c in instance.chunk_list[instance.chunk_start[d] : instance.chunk_start[d + 1]]:
                occupied += instance.activation[c] * (turn + down[c] - up[c])
                if not fuses:
                    occupied += instance.stash[c] * backward[c]
            _raise(best, argued, _MEMORY, before + m * occupied / limit, d)
        for e in range(num_devices):
            until_backward = turn + down[last[e]] - up[first[d]]
            after_forward = turn + down[first[d]] - up[last[e]] - forward[last[e]] + end_of_last
            if not holds_all[e]:
                between = max(0.0, work[e] - most_forward[e] - most_backward[e])
                _raise(best, argued, _PATH, before + until_backward + between + after_forward, e)
            if e == d:
                _raise(best, argued, _WARM_UP, before + work[e] + max(0.0, until_backward - most_forward[e]), e)
                _raise(best, argued, _COOL_DOWN, before + work[e] + max(0.0, after_forward - most_backward[e]), e)
            elif first[e] > first[d]:
                there = up[first[e]] - up[first[d]]
                back = down[first[d]] - down[first[e]] - backward[first[e]] + end_of_last
                late = max(0.0, work[e] - most_forward[e] - most_weight[e])
                early = max(0.0, work[e] - most_backward[e])
                _raise(best, argued, _RELAY, before + there + work[e] - most_weight[e] + back, e)
                _raise(best, argued, _WARM_UP, before + until_backward + late + back, e)
                _raise(best, argued, _COOL_DOWN, before + there + early + after_forward, e)
    return best, argued


@njit(cache=True, nogil=True)
def _raise(best, argued, name, seconds, device):
    if seconds > best[name]:
        best[name], argued[name] = seconds, device


@njit(cache=True, nogil=True)
def _fill(capacity, sizes, seconds, count):
    """The most seconds of work whose bytes fit, from `count` items of each kind (bytes, seconds).

    Exact for equal sizes, otherwise the last item may be cut, which can only raise the result.
    """
    if capacity == np.inf:
        return count * seconds.sum()
    if sizes.min() == sizes.max() and sizes[0] > 0.0:
        return _take_largest(seconds, min(int(capacity / sizes[0]), count * len(sizes)), count)
    return _cut_fill(capacity, sizes, seconds, count)


@njit(cache=True, nogil=True)
def _take_largest(seconds, room, count):
    total = 0.0
    for value in np.sort(seconds)[::-1]:
        taken = min(count, room)
        total += taken * value
        room -= taken
    return total


@njit(cache=True, nogil=True)
def _cut_fill(capacity, sizes, seconds, count):
    total = 0.0
    worth = np.full(len(sizes), np.inf)
    for i in range(len(sizes)):
        if sizes[i] > 0.0:
            worth[i] = seconds[i] / sizes[i]
    for i in np.argsort(-worth):
        share = 1.0 if sizes[i] == 0.0 else min(1.0, max(0.0, capacity) / (sizes[i] * count))
        total += share * count * seconds[i]
        capacity -= share * count * sizes[i]
    return total


@njit(cache=True, nogil=True)
def _fill_backward(limit, activation, stash, both, alone, m):
    """The most B and W seconds that can remain on a device at the end of its last F.

    What remains is x microbatches that wait for B and W (M_B each) and y that wait for W alone (M_W each).
    """
    if limit == np.inf:
        return m * both.sum()
    if activation.min() == activation.max() and stash.min() == stash.max() and activation[0] > 0.0:
        held, deferred = activation[0], stash[0]
        everything = m * len(activation)
        best = 0.0
        for x in range(min(int(limit / held), everything) + 1):
            rest = everything - x
            y = rest if deferred == 0.0 else min(int((limit - x * held) / deferred), rest)
            best = max(best, _take_largest(both, x, m) + _take_largest(alone, y, m))
        return best
    filled = _cut_fill(limit, np.concatenate((activation, stash)), np.concatenate((both, alone)), m)
    return min(filled, m * both.sum())
