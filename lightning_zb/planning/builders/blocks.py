"""V placement below the memory of 1f1b: one building block for every microbatch, and with it v-half and v-min.

After Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): every six units of time (F0, F1, B1,
B0 and two W of one unit each) each device starts the same block for the next microbatch, so what it holds is the time
from a chunk's F to its B over six. The slopes of F and B over the devices set that time. Delays at the three turning
points of a block keep its passes on one device apart; of those that fit the memory, the block that is fastest at the true
costs wins. Before the first block has come home and after the last has begun, passes move up into units that no block
fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numba import njit

from lightning_zb.planning.builders.greedy import order_offsets, rework
from lightning_zb.planning.placement import wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Floats, Integers, PassTable, run_step, tabulate

_PERIOD = 6  # F, B and W of two chunks
_MOST_DELAY = 8  # units of a block's turning points together; more only holds memory longer
_NUM_TRIED = 6  # orders that are reworked by the true costs
_TOLERANCE = 1e-9  # of a limit: sums of bytes in floating point

Slopes = tuple[int, int, int, int]
"""Units from one device to the next for F0 (down the V), F1 (up), B1 (down) and B0 (up)."""

_HALF: tuple[Slopes, ...] = ((2, 1, 2, 1), (1, 2, 1, 2))
_LEAST: tuple[Slopes, ...] = ((1, 1, 1, 1),)
ALL_SLOPES: tuple[Slopes, ...] = tuple(product((1, 2), repeat=4))  # type: ignore[arg-type]


def blocks(num_devices: int, slopes: Slopes) -> Iterator[Integers]:
    """The building blocks of some slopes, those with short delays first.

    Returns:
        (num_devices, 4) units at which F0, F1, B1, B0 of microbatch 0 start, different modulo six in each row.
    """
    down, up = np.arange(num_devices), np.arange(num_devices)[::-1]
    for delays in sorted(product(range(_PERIOD), repeat=3), key=sum):
        if sum(delays) > _MOST_DELAY:
            return
        starts = np.empty((num_devices, 4), dtype=np.int64)
        base = 0
        for leg, (slope, delay) in enumerate(zip(slopes, (0, *delays), strict=True)):
            starts[:, leg] = base + delay + slope * (down if leg % 2 == 0 else up)
            base = starts[:, leg].max() + 1
        places = np.sort(starts % _PERIOD, axis=1)
        if (places[:, 1:] != places[:, :-1]).all():
            yield starts


def _repeat(starts: Integers, problem: Problem, table: PassTable) -> Integers:
    """The unit in which each F and B starts (indexed as in `PassTable`) with one block every six units."""
    m, cells = problem.num_microbatches, table.num_cells
    units = np.empty(2 * cells, dtype=np.int64)
    for device, row in enumerate(starts):
        first, second = problem.placement.chunks_of(device)
        for leg, start in zip((first * m, second * m, cells + second * m, cells + first * m), row, strict=True):
            units[leg : leg + m] = start + _PERIOD * np.arange(m)
    return units


@njit(cache=True, nogil=True)
def _with_weights(units, owner, m, num_devices):  # pragma: no cover (compiled)
    """The units of F and B and, behind them, of W: each W in the first unit that is free on its device, oldest B first."""
    cells = len(units) // 2
    horizon = units.max() + 1 + cells
    taken = np.zeros((num_devices, horizon), dtype=np.bool_)
    result = np.empty(3 * cells, dtype=np.int64)
    result[: 2 * cells] = units
    for x in range(2 * cells):
        taken[owner[x], units[x]] = True
    earliest = np.zeros(num_devices, dtype=np.int64)
    for i in np.argsort(units[cells:], kind="mergesort"):
        d = owner[cells + i]
        unit = max(earliest[d], units[cells + i] + 1)
        while taken[d, unit]:
            unit += 1
        result[2 * cells + i] = unit
        earliest[d] = unit + 1
    return result


@njit(cache=True, nogil=True)
def _earliest(units, x, m, cells):  # pragma: no cover (compiled)
    """The first unit in which a pass may run, by the passes that it follows."""
    unit = units[x - 1] + 1 if x % m > 0 else 0
    if x >= cells:
        unit = max(unit, units[x - cells] + 1)
    if x < cells and x >= m:
        unit = max(unit, units[x - m] + 1)
    if cells <= x < 2 * cells and x - cells + m < cells:
        unit = max(unit, units[x + m] + 1)
    return unit


@njit(cache=True, nogil=True)
def _move_up(units, owner, m, memory, room):  # pragma: no cover (compiled)
    """Move passes of the warm-up and the cool-down into earlier free units, as far as dependencies and memory let them.

    Args:
        units: the unit of each F, B and W, changed in place.
        owner, memory: device of each pass, and the bytes it adds.
        m: microbatches.
        room: bytes by device.
    """
    cells = len(units) // 3
    warm, drained = units[cells], units[m - 1]  # the first B and the last F of chunk 0
    num_units = units.max() + 1
    taken = np.zeros((len(room), num_units), dtype=np.bool_)
    held = np.zeros((len(room), num_units))  # bytes after each unit
    for x in range(len(units)):
        taken[owner[x], units[x]] = True
        held[owner[x], units[x]] = memory[x]
    for d in range(len(room)):
        held[d] = np.cumsum(held[d])
    for x in np.argsort(units, kind="mergesort"):
        old, d = units[x], owner[x]
        if warm <= old <= drained:
            continue
        new = old
        for unit in range(old - 1, _earliest(units, x, m, cells) - 1, -1):
            if memory[x] > 0.0 and held[d, unit] + memory[x] > room[d]:
                break
            if not taken[d, unit]:
                new = unit
        taken[d, old], taken[d, new] = False, True
        held[d, new:old] += memory[x]
        units[x] = new


@njit(cache=True, nogil=True)
def _peak_with_weights(row, memory, cells):  # pragma: no cover (compiled)
    """The most bytes of a device that runs an F or B where `row` names one, otherwise the oldest W that is due."""
    held = peak = 0.0
    due = np.empty(len(row), dtype=np.int64)
    first = last = 0
    for x in row:
        if x >= 0:
            held += memory[x]
            peak = max(peak, held)
            if x >= cells:
                due[last] = x + cells
                last += 1
        elif first < last:
            held += memory[due[first]]
            first += 1
    return peak


@njit(cache=True, nogil=True)
def _move_up_over_weights(units, owner, m, memory, room):  # pragma: no cover (compiled)
    """Move F and B of the cool-down into earlier units, as if W filled whatever is free then; see `_move_up`.

    Args:
        units: the unit of each F and B, changed in place.
        owner, m, memory, room: as in `_move_up`.
    """
    cells = len(units) // 2
    drained = units[m - 1]
    rows = np.full((len(room), units.max() + 1), -1)
    for x in range(len(units)):
        rows[owner[x], units[x]] = x
    for x in np.argsort(units, kind="mergesort"):
        old, row = units[x], rows[owner[x]]
        if old <= drained:
            continue
        row[old] = -1
        for unit in range(_earliest(units, x, m, cells), old + 1):
            if row[unit] < 0:
                row[unit] = x
                if unit == old or _peak_with_weights(row, memory, cells) <= room[owner[x]]:
                    units[x] = unit
                    break
                row[unit] = -1


def _order(units: Integers, table: PassTable) -> Integers:
    """The passes of each device by unit."""
    return np.lexsort((units, table.owner[: len(units)])).astype(np.int64)


def _peaks(added: Floats, offsets: Integers) -> Floats:
    """The most bytes of each device, given what each pass of an order adds."""
    return np.array([np.cumsum(part).max() for part in np.split(added, offsets[1:-1])])


def _block_orders(starts: Integers, problem: Problem, table: PassTable, room: Floats) -> Iterator[Integers]:
    """The orders of one block: repeated, with free units filled, and with the cool-down moved up once more over the W.

    Passes move up within the room and the true bytes, and again as if a B freed nothing, within what the repeated block
    then holds: that keeps W closer to their B, and more regular orders are often faster.
    """
    m, num_devices, cells = problem.num_microbatches, problem.placement.num_devices, table.num_cells
    owner, offsets = table.owner, order_offsets(problem)
    repeated = _with_weights(_repeat(starts, problem, table), owner, m, num_devices)
    first = _order(repeated, table)
    yield first
    if (_peaks(table.memory[first], offsets) > room).any():
        return
    held = table.memory[: 3 * cells].copy()
    held[cells : 2 * cells], held[2 * cells :] = 0.0, -held[:cells]
    most = np.full(num_devices, _peaks(held[first], offsets).max())
    for memory, limits in ((table.memory, room), (held, most)):
        units = repeated.copy()
        _move_up(units, owner, m, memory, limits)
        order = _order(units, table)
        yield order
        start, _ = run_step(_in_units(table), order, offsets)  # closes the gaps that this has left
        units[order] = np.round(start).astype(np.int64)
        leads = units[: 2 * cells].copy()
        _move_up_over_weights(leads, owner, m, memory, limits)
        yield _order(_with_weights(leads, owner, m, num_devices), table)


def _in_units(table: PassTable) -> PassTable:
    """The same passes, each one unit long, without links."""
    return replace(table, duration=np.ones_like(table.duration), lag=np.zeros_like(table.lag))


def block_schedules(problem: Problem, slopes: Iterable[Slopes], limits: Sequence[float], count: int = 1) -> list[Schedule]:
    """The fastest schedules that repeat one block and fit.

    Args:
        problem: on a V placement; its own limits do not matter.
        slopes: of the blocks to try.
        limits: activation bytes by device.
        count: how many different schedules at most.

    Returns:
        The fastest first; none where no block fits.

    Raises:
        ValueError: the placement is not a V.
    """
    placement, m = problem.placement, problem.num_microbatches
    if placement != wave(placement.num_devices, 2):
        raise ValueError(
            f"this schedule needs two chunks per device in a V, not {list(placement.devices)}; for other placements use 'zb'"
        )
    # blocks repeat, so a few microbatches tell which are the fastest
    short = replace(problem, num_microbatches=min(m, 3 * placement.num_devices))
    found = _orders(short, [s for slope in slopes for s in blocks(placement.num_devices, slope)], limits)
    found = found[: max(count, _NUM_TRIED)]
    if short != problem:
        found = _orders(problem, list({id(starts): starts for _, starts, _ in found}.values()), limits)
    table, offsets = _table(problem), order_offsets(problem)
    reworked = [
        (_span(table, order, offsets), order)
        for _, _, before in found[:_NUM_TRIED]
        for order in (before, *(rework(problem, table, before, offsets, tuple(limits), drain) for drain in (False, True)))
    ]
    distinct = {order.tobytes(): (span, order) for span, order in sorted(reworked, key=lambda item: item[0])}
    return [table.decode(order, offsets) for _, order in list(distinct.values())[:count]]


def _orders(
    problem: Problem, candidates: Iterable[Integers], limits: Sequence[float]
) -> list[tuple[float, Integers, Integers]]:
    """All orders of some blocks that fit, fastest first: seconds, block, order."""
    table, offsets = _table(problem), order_offsets(problem)
    room = np.array(limits) * (1.0 + _TOLERANCE)
    found = [
        (_span(table, order, offsets), starts, order)
        for starts in candidates
        for order in _block_orders(starts, problem, table, room)
        if (_peaks(table.memory[order], offsets) <= room).all()
    ]
    return sorted(found, key=lambda item: item[0])


def _table(problem: Problem) -> PassTable:
    return tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)


def _span(table: PassTable, order: Integers, offsets: Integers) -> float:
    start, end = run_step(table, order, offsets)
    return float((end[offsets[1:] - 1] - start[offsets[:-1]]).max())


def _builder(slopes: Iterable[Slopes], share: float) -> Callable[[Problem], Schedule]:
    """A builder of the fastest order of the blocks that hold no more than a share of 1f1b's memory and M_B.

    Where some fit the limits of the problem, one of these.
    """

    def build(problem: Problem) -> Schedule:
        num_devices = problem.placement.num_devices
        budget = (math.ceil(share * num_devices) + 1) / num_devices * sum(c.activation_bytes for c in problem.chunk_costs)
        limits = tuple(min(budget, limit) for limit in problem.limits)
        # unequal chunks may need more than that share
        rooms = (limits, *((factor * budget,) * len(limits) for factor in (1.0, 1.1, 1.25, 1.5, 2.0, np.inf)))
        return next(schedules[0] for room in rooms if (schedules := block_schedules(problem, slopes, room)))

    return build


def _spec(name: str, slopes: Iterable[Slopes], share: float, memory: str) -> ScheduleSpec:
    return ScheduleSpec(
        name=name,
        placement=lambda num_devices, num_layers: wave(num_devices, 2),
        build=_builder(slopes, share),
        assumption="T_F = T_B = T_W; arXiv 2405.15362",
        memory=memory,
        fixed_order=True,
    )


register(_spec("v-half", _HALF, 1 / 2, "(P/2 + 1) x M_B on every device"))
register(_spec("v-min", _LEAST, 1 / 3, "(P/3 + 1) x M_B on every device"))
