"""V placement with memory to spare: all devices in lockstep, in every round a B and then an F each.

After the public scheduler of zb-v by Qi et al. (github.com/sail-sg/zero-bubble-pipeline-parallelism). The warm-up runs as
many F as arrive in time for the first way through the V and as the memory holds; then the devices take turns, which keeps
the order of F and B regular however long the transfers are. Where memory is plenty that beats decisions by time, whose small
delays add up over the devices. W fill what they fit into, make room, and keep a device from becoming the one with the most
idle time; a second pass knows how much idle time each device had in the first, and lets it have the rest beforehand. Times
rounded to parts of an F keep passes aligned here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_zb.planning.builders.greedy import Choices, order_offsets, rework
from lightning_zb.planning.placement import wave
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.simulation import Floats, Integers, PassTable

_TOLERANCE = 1e-9  # of a limit: sums of bytes in floating point
_ALMOST = 1.0 - 1e-9  # times that are equal but for rounding count as equal
# Parts of the mean F to which durations are rounded, and what a transfer then takes in F: as `tuning` has them.
_ROUNDED = ((4, 1 / 8), (4, 1 / 12), (3, 0.0))
_MOST_REPEATS = 4  # of the rounds, with the idle times of the time before


def lockstep_orders(problem: Problem, table: PassTable) -> Iterator[Integers]:
    """Complete orders within the limits, for the ways to place W; none where the placement is no V or nothing fits.

    Args:
        problem: what is to be ordered.
        table: its passes.
    """
    placement, m = problem.placement, problem.num_microbatches
    if placement != wave(placement.num_devices, 2):
        return
    room = np.array(problem.limits) * (1.0 + _TOLERANCE)
    offsets = order_offsets(problem)
    for (duration, lag), fill_backward in product(_clocks(table), (True, False)):
        allowed = np.zeros(placement.num_devices)
        before = np.inf
        for _ in range(_MOST_REPEATS):
            order = np.empty(offsets[-1], dtype=np.int64)
            idle = _take_turns(m, duration, lag, table.memory, room, fill_backward, allowed, order)
            if len(idle) == 0:
                break
            yield order
            if idle.max() >= before:
                break
            before, allowed = idle.max(), idle.max() - idle
        if len(idle) > 0 and duration is table.duration:
            choices = Choices(fill_backward=fill_backward)
            yield rework(problem, table, order, offsets, problem.limits, from_drain=True, choices=choices)


def _clocks(table: PassTable) -> Iterator[tuple[Floats, Floats]]:
    """Times by which to order: durations and transfers of each pass, first the true ones."""
    yield table.duration, table.lag
    mean = table.duration[: table.num_cells].mean()
    for parts, transfer in _ROUNDED if mean > 0.0 else ():
        yield np.round(table.duration / mean * parts) * (mean / parts), np.where(table.lag > 0.0, transfer * mean, 0.0)


class _Rounds(NamedTuple):
    """What the rounds have done so far (a NamedTuple because numba takes it as it is).

    Args:
        end: of each F and B, -1 until it has run.
        free: when each device is free.
        held: bytes by device.
        idle: seconds that each device has waited since its first pass.
        order: passes, one device after the other.
        position: the next place of each device in `order`.
        due: the first pass in `order` whose W may be due, by device.
    """

    end: np.ndarray
    free: np.ndarray
    held: np.ndarray
    idle: np.ndarray
    order: np.ndarray
    position: np.ndarray
    due: np.ndarray


@njit(cache=True, nogil=True)
def _put_weight(rounds, d, duration, memory):  # pragma: no cover (compiled)
    """Run the oldest W that is due on a device; False where there is none."""
    cells = len(rounds.end) // 2
    while rounds.due[d] < rounds.position[d]:
        x = rounds.order[rounds.due[d]]
        rounds.due[d] += 1
        if cells <= x < 2 * cells:
            rounds.order[rounds.position[d]] = x + cells
            rounds.position[d] += 1
            rounds.free[d] += duration[x + cells]
            rounds.held[d] += memory[x + cells]
            return True
    return False


@njit(cache=True, nogil=True)
def _put(rounds, x, d, m, duration, lag, memory, room, fills, allowed):  # pragma: no cover (compiled)
    """Run an F or B on its device, and before it the W that the rules ask for; False where its input or room is missing."""
    end = rounds.end
    cells = len(end) // 2
    before = x - m if x < cells else x + m if x + m < 2 * cells else x - cells
    if (before >= 0 and end[before] < 0.0) or (x >= cells and end[x - cells] < 0.0):
        return False
    while rounds.held[d] + memory[x] > room[d]:
        if not _put_weight(rounds, d, duration, memory):
            return False
    arrival = end[before] + lag[before] if before >= 0 else 0.0
    begins = rounds.position[d] % (3 * cells // len(room)) == 0
    shortest = duration[2 * cells + x % cells]
    while not begins and arrival >= rounds.free[d] + shortest * _ALMOST and shortest > 0.0:
        if not _put_weight(rounds, d, duration, memory):
            break
    most = max(rounds.idle.max(), allowed[d])
    if fills and not begins and (arrival - rounds.free[d]) * _ALMOST > most - rounds.idle[d]:
        _put_weight(rounds, d, duration, memory)
    begin = max(rounds.free[d], arrival)
    if not begins:
        rounds.idle[d] += begin - rounds.free[d]
    end[x] = rounds.free[d] = begin + duration[x]
    rounds.held[d] += memory[x]
    rounds.order[rounds.position[d]] = x
    rounds.position[d] += 1
    return True


@njit(cache=True, nogil=True)
def _take_turns(m, duration, lag, memory, room, fill_backward, allowed, order):  # pragma: no cover (compiled)
    """Order all passes; device d has chunk d on the way down the V and chunk n - 1 - d on the way up.

    Args:
        m: microbatches.
        duration, lag, memory: by pass, see `PassTable`.
        room: bytes by device.
        fill_backward: see `Choices`; F, and B on the way up, always let a W go first that they delay.
        allowed: idle seconds that each device may have whatever the others had so far.
        order: written, one device after the other.

    Returns:
        Idle seconds of each device after its first pass; empty where the rounds come to a halt.
    """
    num_devices, n = len(room), 2 * len(room)
    cells = n * m
    zeros, offsets = np.zeros(num_devices), 6 * m * np.arange(num_devices)
    end = np.full(2 * cells, -1.0)
    rounds = _Rounds(end, zeros.copy(), zeros.copy(), zeros.copy(), order, offsets.copy(), offsets.copy())
    forwards, backwards = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    failed = np.empty(0)
    for d in range(num_devices):
        if not _put(rounds, d * m, d, m, duration, lag, memory, room, False, allowed):
            return failed
        forwards[d] = 1
    for d in range(num_devices - 1, -1, -1):  # on the way up there is time for more F on the way down
        first = (n - 1 - d) * m
        while d < num_devices - 1 and forwards[d] < m:
            fits = rounds.free[d] + duration[d * m] * _ALMOST <= end[first - m] + lag[first - m]
            for e in range(d + 1):  # and every device above keeps as much again for its own waiting
                fits = fits and rounds.held[e] + (e + 1) * (memory[e * m] + memory[(n - 1 - e) * m]) <= room[e]
            if not fits:
                break
            for e in range(d + 1):
                _put(rounds, e * m + forwards[e], e, m, duration, lag, memory, room, False, allowed)
                forwards[e] += 1
        if not _put(rounds, first, d, m, duration, lag, memory, room, False, allowed):
            return failed
        forwards[n - 1 - d] = 1
    up = False
    for d in range(1, num_devices):  # each device runs as many F before its first B as the one above it
        above = forwards[d - 1] + forwards[n - d]
        while forwards[d] + forwards[n - 1 - d] < above or forwards[n - 1 - d] <= forwards[n - d] < m:
            for e in range(num_devices - 1, d - 1, -1):
                c = n - 1 - e if up else e
                if forwards[c] < m:
                    if not _put(rounds, c * m + forwards[c], e, m, duration, lag, memory, room, False, allowed):
                        return failed
                    forwards[c] += 1
            up = not up
    goes_up = np.empty(num_devices, dtype=np.bool_)
    for _ in range(2 * m):
        for d in range(num_devices):  # the gradients' way down comes first; a device then takes both in turn
            c, last = d, n - 1 - d
            if backwards[c] >= backwards[last]:
                goes_up[d] = False
            else:
                is_there = d == num_devices - 1 or end[cells + (c + 1) * m + backwards[c]] >= 0.0
                goes_up[d] = is_there or backwards[last] >= m
        for i in range(2 * num_devices):  # what another device of this round may wait for comes first
            d = num_devices - 1 - i if i < num_devices else i - num_devices
            if goes_up[d] != (i < num_devices):
                continue
            c = d if goes_up[d] else n - 1 - d
            fills = goes_up[d] or fill_backward
            if not _put(rounds, cells + c * m + backwards[c], d, m, duration, lag, memory, room, fills, allowed):
                return failed
            backwards[c] += 1
        for d in range(num_devices):
            c, last = d, n - 1 - d
            if forwards[last] >= m:
                continue
            if forwards[last] < forwards[c] and end[(last - 1) * m + forwards[last]] >= 0.0:
                c = last
            elif forwards[c] >= m or (d > 0 and end[(c - 1) * m + forwards[c]] < 0.0):
                continue
            if not _put(rounds, c * m + forwards[c], d, m, duration, lag, memory, room, True, allowed):
                return failed
            forwards[c] += 1
    for d in range(num_devices):
        while _put_weight(rounds, d, duration, memory):
            pass
    return rounds.idle
