"""Annealing of an order in which the waiting of every device counts, not the longest alone.

Close to what is possible, many devices wait a little too long at the same time, and none of them can be mended without
touching what others run. `annealing` looks at the longest span; here each device pays for the square of what its span exceeds
a target, a little below the best span so far. A move exchanges or shifts passes near a wait or near what caused it, or shifts
a microbatch's passes on several devices at once (see `joint_moves`). Only what starts after the change is run again, and no
further than until the waits are too many.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_zb.planning.instance import reduce_gradients
from lightning_zb.planning.joint_moves import settle, shift_chain, shift_near
from lightning_zb.planning.order_moves import DEVICE, FIRST, FOLLOW, LEAD, LEAD_LAG, LENGTH, make_streams
from lightning_zb.planning.random_stream import below, uniform

_MOVE_WORK = 40  # choosing and checking a move, compared with running one pass
_GUIDE = 0.0015  # what a second of waiting costs beside, in mean passes: tells equal orders apart
_CHAINS = 0.4  # share of the moves that follow a microbatch over the devices
_NEAR_WAITS = 0.85  # share of the moves that begin near a wait


@njit(cache=True, nogil=True)
def level(instance, order, stream, budget, target, hot, cold, own_start):
    """Improve an order that runs and fits.

    Args:
        instance: the problem.
        order: flat order; holds afterwards the one of least cost, which is not always the one of least span.
        stream: state of the random stream, advanced.
        budget: work to spend, counted in passes run; a move costs at least `_MOVE_WORK`.
        target: span in seconds up to which a device pays next to nothing.
        hot: temperature at the beginning, as a share of the cost that the order has then.
        cold: at the end.
        own_start: 1 for step_time, 0 for makespan.

    Returns:
        The cost, in square seconds.
    """
    total = len(order)
    num_devices = len(instance.chunk_start) - 1
    offset = instance.offset
    streams, ways, traits = make_streams(instance)
    place, sites = np.empty(total, np.int32), np.empty(total, np.int32)
    start, waited = np.zeros(total), np.zeros(total)  # of each pass; of its device up to each place
    then, waited_then, run_in = np.empty(total), np.empty(total), np.zeros(total, np.int64)  # the same after a move
    work_of = np.zeros(num_devices)
    for d in range(num_devices):
        for i in range(offset[d], offset[d + 1]):
            place[order[i]] = i
            work_of[d] += traits[streams[order[i]], LENGTH]
    low, high = np.full(num_devices, total), np.full(num_devices, -1)  # what a move touched
    following = np.empty(len(ways), np.int64)
    position = offset[:-1].copy()
    guide = _GUIDE * instance.duration.mean()
    cost, work = rerun(
        instance, order, start, -1.0, then, run_in, 1, waited, waited_then, position, streams, ways, traits, work_of, target,
        guide, own_start, np.inf,
    )  # fmt: skip
    start[:], waited[:] = then, waited_then
    num_sites = find_sites(instance, order, waited, work_of, target, stream, sites)
    before, best_order = order.copy(), order.copy()
    best = at_first = cost
    move = 1
    while work < budget:
        move += 1
        work += _MOVE_WORK
        temperature = at_first * hot * (cold / hot) ** (work / budget)
        if num_sites > 0 and uniform(stream) < _NEAR_WAITS:
            at = near_a_wait(order, place, waited, streams, ways, stream, sites[below(stream, num_sites)])
        else:
            at = below(stream, total)
        if uniform(stream) < _CHAINS:
            done = shift_chain(order, place, streams, ways, low, high, stream, at)
        else:
            done = shift_near(order, place, streams, ways, low, high, stream, at)
            if done and uniform(stream) < 0.3:
                done = shift_near(order, place, streams, ways, low, high, stream, at)
        if done and settle(instance, order, place, streams, traits, low, high, following):
            since = np.inf
            for d in range(num_devices):
                if high[d] >= 0:
                    y = order[low[d] - 1]  # the first pass of a device never moves
                    since = min(since, start[y] + traits[streams[y], LENGTH])
            for d in range(num_devices):
                position[d] = first_since(order, start, offset[d], min(offset[d + 1], low[d]), since)
            allowed = cost - temperature * np.log(uniform(stream) + 1e-300)
            found, ran = rerun(
                instance, order, start, since, then, run_in, move, waited, waited_then, position, streams, ways, traits,
                work_of, target, guide, own_start, allowed,
            )  # fmt: skip
            work += ran
            done = found <= allowed
        else:
            done = False
        for d in range(num_devices):
            if high[d] >= 0:
                if done:
                    before[low[d] : high[d] + 1] = order[low[d] : high[d] + 1]
                else:
                    for i in range(low[d], high[d] + 1):
                        order[i] = before[i]
                        place[order[i]] = i
                low[d], high[d] = total, -1
        if not done:
            continue
        cost = found
        for x in range(total):
            if run_in[x] == move:
                start[x] = then[x]
                waited[place[x]] = waited_then[place[x]]
        num_sites = find_sites(instance, order, waited, work_of, target, stream, sites)
        work += total // 4
        if cost < best:
            best = cost
            best_order[:] = order
    order[:] = best_order
    return best


@njit(cache=True, nogil=True)
def rerun(
    instance, order, start, since, then, run_in, move, waited, waited_then, position, streams, ways, traits, work_of, target,
    guide, own_start, allowed,
):  # fmt: skip
    """Run the passes from some time on, as early as the order allows, until the cost is more than allowed.

    Args:
        start: of each pass before the move; those that started before `since` stay.
        then: starts after the move, written for the passes that `run_in` marks with the move's number.
        waited: seconds that a device has waited up to each place.
        waited_then: after the move, written for the places from `position` on.
        position: the first place to run of each device, advanced.
        work_of: seconds of all passes of each device.
        guide: cost of a second of waiting.

    Returns:
        The cost, infinite where the order deadlocks or costs more than is allowed, and how many passes were run.
    """
    offset = instance.offset
    num_devices = len(work_of)
    waits_for = np.full(num_devices, -1)
    stack = np.empty(num_devices + 1, np.int32)
    now_of, so_far_of, excess = np.zeros(num_devices), np.zeros(num_devices), np.empty(num_devices)
    top = left = ran = 0
    cost = 0.0
    for d in range(num_devices - 1, -1, -1):
        stack[top] = d
        top += 1
        i = position[d]
        left += offset[d + 1] - i
        if i > offset[d]:
            y = order[i - 1]
            now_of[d] = start[y] + traits[streams[y], LENGTH]
            so_far_of[d] = waited[i - 1]
        excess[d] = max(0.0, work_of[d] + so_far_of[d] - target)
        cost += excess[d] * excess[d] + guide * so_far_of[d]
    if cost > allowed:
        return np.inf, ran
    while top > 0:
        top -= 1
        d = stack[top]
        i, now, so_far = position[d], now_of[d], so_far_of[d]
        while i < offset[d + 1]:
            x = order[i]
            s = streams[x]
            begin = now
            if ways[s, LEAD] != 0:
                y = x + ways[s, LEAD]
                if run_in[y] == move:
                    ready = then[y]
                elif start[y] < since:
                    ready = start[y]
                else:
                    waits_for[d] = y
                    break
                begin = max(begin, ready + traits[streams[y], LENGTH] + traits[s, LEAD_LAG])
            if begin > now:
                more = (begin - now) * (1.0 - own_start if i == offset[d] else 1.0)
                so_far += more
                longer = max(0.0, work_of[d] + so_far - target)
                cost += longer * longer - excess[d] * excess[d] + guide * more
                excess[d] = longer
                if cost > allowed:
                    return np.inf, ran
            waited_then[i], then[x], run_in[x] = so_far, begin, move
            now = begin + traits[s, LENGTH]
            i += 1
            ran += 1
            if ways[s, FOLLOW] != 0:
                z = x + ways[s, FOLLOW]
                other = ways[streams[z], DEVICE]
                if waits_for[other] == x:
                    waits_for[other] = -1
                    stack[top] = other
                    top += 1
        position[d], now_of[d], so_far_of[d] = i, now, so_far
    if ran < left:
        return np.inf, ran
    if instance.reduction.any():
        end = np.empty(len(order))
        for x in range(len(order)):
            end[x] = (then[x] if run_in[x] == move else start[x]) + traits[streams[x], LENGTH]
        reduce_gradients(instance, end, now_of)
        for d in range(num_devices):
            y = order[offset[d]]
            longer = max(0.0, now_of[d] - own_start * (end[y] - traits[streams[y], LENGTH]) - target)
            cost += longer * longer - excess[d] * excess[d]
    return cost, ran


@njit(cache=True, nogil=True)
def first_since(order, start, first, last, since):
    """The first place of a stretch of one device that starts at a time or later, found by halving."""
    while first < last:
        middle = (first + last) // 2
        if start[order[middle]] >= since:
            last = middle
        else:
            first = middle + 1
    return first


@njit(cache=True, nogil=True)
def find_sites(instance, order, waited, work_of, target, stream, sites):
    """Write the places before which a device waits that exceeds the target, and some of the others; how many there are."""
    offset = instance.offset
    tiny = 1e-6 * instance.duration.max()
    found = 0
    for d in range(len(work_of)):
        exceeds = work_of[d] + waited[offset[d + 1] - 1] > target
        for i in range(offset[d] + 1, offset[d + 1]):
            if waited[i] - waited[i - 1] > tiny and (exceeds or uniform(stream) < 0.15):
                sites[found] = i
                found += 1
    return found


@njit(cache=True, nogil=True)
def near_a_wait(order, place, waited, streams, ways, stream, at):
    """A place where a device waits, or the pass of another device that it waits for, or what that one waited for before."""
    for _ in range(below(stream, 5)):
        first = ways[streams[order[at]], FIRST]
        while at > first and waited[at] == waited[at - 1]:
            at -= 1
        way = ways[streams[order[at]], LEAD]
        if at == first or way == 0:
            break
        at = place[order[at] + way]
        if uniform(stream) < 0.4:
            break
    return at
