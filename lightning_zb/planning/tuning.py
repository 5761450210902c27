"""Tuning of the list scheduler: evolve its few numbers on simple clocks, score the orders on true times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit

from lightning_zb.planning.instance import Instance, fits_memory, mean_cost, on_stairs, span_cost, start_times
from lightning_zb.planning.list_scheduling import Clock, list_schedule
from lightning_zb.planning.random_stream import bell, below, uniform

# Layout of a parameter vector: these six, then a base and a slope for each kind and level, in periods at eight devices
# (the time a microbatch stays in flight grows with the number of devices, and so do the differences of urgency).
PATIENCE, RESERVE, CLOCK, FIRST_MIDDLE, TAIL, MIDDLE_LAG, HEAD = range(7)
NUM_CLOCKS = 4


_NEVER_WAIT = 1e30

# Clock, first and last microbatch (from the end, in devices) with transfers, their length in F, and whether a device ever
# waits: where memory is not what limits, transfers that always count leave slack against jitter. The best on the published
# costs come first.
_MANNERS = (
    (2, 1, 0.25, False),
    (3, 0, 0.0625, True),
    (1, 0, 0.125, False),
    (3, 0, 0.125, True),
    (2, 1, 0.25, True),
    (2, 0, 0.125, False),
    (1, 0, 0.25, True),
    (2, 0, 0.25, True),
    (3, 1, 0.125, False),
    (1, 1, 0.125, True),
    (2, 1, 0.5, False),
    (2, 0, 0.5, True),
)


def manners(vector: np.ndarray, num_devices: int) -> Iterator[np.ndarray]:
    """The vector with other clocks and transfers that count from the first microbatch on."""
    for clock, tail, lag, never_waits in _MANNERS:
        changed = vector.copy()
        changed[CLOCK], changed[FIRST_MIDDLE], changed[TAIL], changed[MIDDLE_LAG] = clock, 0, tail * num_devices, lag
        if never_waits:
            changed[PATIENCE] = _NEVER_WAIT
        yield changed


# Steps by which the first devices hold less than the last, and the reserve of the list scheduler. A B that takes longer than
# an F reaches each device later than the one before, which then waits until one more F fits: the steps say where.
_STAIRS = ((0, 1.0), (1, 0.0), (0, 0.0), (2, 0.5), (1, 1 / 3), (0, 1 / 3), (3, 0.5), (2, 0.0))


def all_manners(instance: Instance, starts: Sequence[tuple[float, np.ndarray]]) -> Iterator[tuple[np.ndarray, Instance]]:
    """The starts in all manners and on all stairs, the best start first in each manner.

    Args:
        instance: the problem.
        starts: vectors with what they cost, looked at when the first is asked for.

    Yields:
        A vector, and the problem with the limits to use.
    """
    vectors = [start for _, start in sorted(starts, key=lambda pair: pair[0])]
    for steps, reserve in _STAIRS:
        within = on_stairs(instance, steps)
        for alike in zip(*(manners(start, instance.num_devices) for start in vectors), strict=True):
            for vector in alike:
                vector[RESERVE] = reserve
                yield vector, within


def num_levels(instance: Instance) -> int:
    """The largest number of chunks on one device."""
    return int(np.diff(instance.chunk_start).max())


def clock_durations(instance: Instance) -> np.ndarray:
    """Candidate clocks: the true durations, then durations rounded to multiples of a half, third and quarter of F.

    Returns:
        Seconds, shape (NUM_CLOCKS, 3, chunks). Where chunks differ, the mean F is the yardstick.
    """
    mean = instance.duration[0].mean()
    if mean <= 0.0:
        mean = max(float(instance.duration.mean()), 1e-12)
    rounded = [np.round(instance.duration / mean * q) * (mean / q) for q in (2, 3, 4)]
    return np.stack([instance.duration, *rounded])


def default_parameters(instance: Instance) -> np.ndarray:
    """A start that works everywhere: B before F before W, later chunks first."""
    levels = num_levels(instance)
    parameters = np.zeros(HEAD + 6 * levels)
    parameters[PATIENCE], parameters[RESERVE], parameters[CLOCK] = 10.0, 1.0, 0.0
    parameters[FIRST_MIDDLE], parameters[TAIL] = 2 * instance.num_devices, instance.num_devices
    for level in range(levels):
        parameters[HEAD + 2 * level] = -level
        parameters[HEAD + 2 * (levels + level)] = -12.0 + level
        parameters[HEAD + 2 * (2 * levels + level)] = 12.0
    return parameters


@njit(cache=True, nogil=True)
def apply_parameters(instance, durations, warm_up_lag, parameters, order):
    """List-schedule with a parameter vector; True when an order came out."""
    n, m = len(instance.device), instance.num_microbatches
    num_devices = len(instance.chunk_start) - 1
    levels = (len(parameters) - HEAD) // 6
    which = int(parameters[CLOCK])
    duration = durations[which]
    period = duration.sum() / num_devices
    spread = period * num_devices / 8.0
    urgency = np.empty((3, n))
    for d in range(num_devices):
        across = d / max(1, num_devices - 1)
        for i in range(instance.chunk_start[d], instance.chunk_start[d + 1]):
            level = i - instance.chunk_start[d]
            for kind in range(3):
                at = HEAD + 2 * (kind * levels + level)
                urgency[kind, instance.chunk_list[i]] = spread * (parameters[at] + parameters[at + 1] * across)
    if which == 0:
        clock = Clock(duration, instance.lag, instance.lag, 0, m, warm_up_lag)
    else:
        middle = np.where(instance.lag > 0.0, parameters[MIDDLE_LAG] * duration[0].mean(), 0.0)
        first, last = int(parameters[FIRST_MIDDLE]), m - int(parameters[TAIL])
        clock = Clock(duration, np.zeros_like(instance.lag), middle, first, last, np.zeros_like(warm_up_lag))
    return list_schedule(instance, clock, urgency, period, parameters[PATIENCE], parameters[RESERVE], order)


@njit(cache=True, nogil=True)
def _mutate(stream, parent, child, num_clocks, num_devices, cooling):
    """Change a few numbers of a parameter vector; now and then all of them."""
    child[:] = parent
    levels = (len(parent) - HEAD) // 6
    if uniform(stream) < 0.03 * cooling:
        scale = 4.0 ** bell(stream)
        for i in range(HEAD, len(child)):
            child[i] = bell(stream) * 6.0 * scale
        for level in range(levels):
            child[HEAD + 2 * (levels + level)] -= 8.0 * scale
            child[HEAD + 2 * (2 * levels + level)] += 8.0 * scale
        child[PATIENCE] = 10.0 * 7.0 ** bell(stream)
        return
    if uniform(stream) < 0.3:
        what = below(stream, 5)
        if what == 0:
            child[FIRST_MIDDLE] = 0.0 if uniform(stream) < 0.25 else below(stream, 4 * num_devices)
        elif what == 1:
            child[TAIL] = 0.0 if uniform(stream) < 0.25 else below(stream, 4 * num_devices)
        elif what == 2:
            child[MIDDLE_LAG] = below(stream, 9) / (4.0 if uniform(stream) < 0.5 else 8.0)
        elif what == 3:
            child[FIRST_MIDDLE] = max(0.0, child[FIRST_MIDDLE] + below(stream, 7) - 3)
        else:
            child[CLOCK] = below(stream, num_clocks)
        if uniform(stream) < 0.4:
            return
    scale = 1.0
    for i in range(HEAD, len(child), 2):
        scale = max(scale, 0.2 * abs(child[i]))
    for _ in range(1 + below(stream, 3)):
        i = below(stream, len(child) - HEAD + 2)
        if i == 0:
            child[PATIENCE] *= 2.7 ** bell(stream)
        elif i == 1:
            child[RESERVE] = 2.0 if uniform(stream) < 0.33 else 1.0
        else:
            step = 2.0 * scale if uniform(stream) < 0.3 else 1.0
            child[HEAD + i - 2] += bell(stream) * step * (0.05 + cooling)


@njit(cache=True, nogil=True)
def tune(
    instance, within, durations, warm_up_lag, parameters, stream, evaluations, own_start, least, heat, best_parameters,
    best_order,
):  # fmt: skip
    """Evolve a parameter vector by cool annealing.

    Args:
        instance: the problem, by whose times orders are compared.
        within: what orders are made for: the same problem with limits that are not larger, or other transfers.
        durations: clocks to choose from, see `clock_durations`.
        warm_up_lag: see `Clock`; counts where times are not rounded.
        parameters: where to start.
        stream: state of the random stream, advanced.
        evaluations: orders to build.
        own_start: 1 to minimise step_time, 0 for makespan.
        least: lower bound of the span in seconds, where the waits of all devices count by their root mean square; infinite
            where the longest span does.
        heat: temperature at the beginning, as a share of the best cost.
        best_parameters: the best vector found, written.
        best_order: its order, written.

    Returns:
        The best cost, infinite where no order was found.
    """
    num_devices = len(instance.chunk_start) - 1
    total = len(best_order)
    order = np.empty(total, np.int32)
    start = np.empty(total)
    ends = np.empty(num_devices)
    current = parameters.copy()
    child = parameters.copy()
    current_cost = best = np.inf
    for trial in range(evaluations):
        cooling = 1.0 - trial / evaluations
        if trial > 0:
            _mutate(stream, current, child, len(durations), num_devices, cooling)
        if not apply_parameters(within, durations, warm_up_lag, child, order):
            continue
        if not start_times(instance, order, start, ends):
            continue
        if least < np.inf:
            cost = mean_cost(instance, order, start, ends, own_start, least)
        else:
            cost = span_cost(instance, order, start, ends, own_start)
        if cost <= current_cost or (
            best < np.inf and uniform(stream) < np.exp((current_cost - cost) / (best * heat * cooling + 1e-300))
        ):
            current[:] = child
            current_cost = cost
        if cost < best and fits_memory(within, order):
            best = cost
            best_parameters[:] = child
            best_order[:] = order
    return best
