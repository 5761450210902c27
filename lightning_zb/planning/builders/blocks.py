"""V placement below the memory of 1f1b: v-half and v-min, made of one building block for every microbatch.

After Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): every six units of time (F0, F1, B1,
B0 and two W of one unit each) each device starts the same block for the next microbatch, so what it holds is the time
from a chunk's F to its B over six. The slopes of F and B over the devices set that time. Delays at the three turning
points of a block keep its passes on one device apart; of those that do, the block that is fastest at the true costs wins.
Before the first block has come home and after the last has begun, passes move up into units that no block fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from numba import njit

from lightning_zb.planning.builders.greedy import rework
from lightning_zb.planning.placement import wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Integers, PassTable, run_step, tabulate

_PERIOD = 6  # F, B and W of two chunks
_MOST_DELAY = 8  # units of a block's turning points together; more only holds memory longer

Slopes = tuple[int, int, int, int]
"""Units from one device to the next for F0 (down the V), F1 (up), B1 (down) and B0 (up)."""


def blocks(num_devices: int, slopes: Slopes) -> Iterator[Integers]:
    """The building blocks of some slopes, those with short delays first.

    Returns:
        (num_devices, 6) units at which F0, F1, B1, B0, W1, W0 of microbatch 0 start, different modulo six in each row.
    """
    down, up = np.arange(num_devices), np.arange(num_devices)[::-1]
    for delays in sorted(product(range(_PERIOD), repeat=3), key=sum):
        if sum(delays) > _MOST_DELAY:
            return
        starts = np.empty((num_devices, 6), dtype=np.int64)
        base = 0
        for leg, (slope, delay) in enumerate(zip(slopes, (0, *delays), strict=True)):
            starts[:, leg] = base + delay + slope * (down if leg % 2 == 0 else up)
            base = starts[:, leg].max() + 1
        places = np.sort(starts[:, :4] % _PERIOD, axis=1)
        if (places[:, 1:] == places[:, :-1]).any():
            continue
        for row in starts:
            row[4] = _next_free(row[2], row[:4])
            row[5] = _next_free(row[3], row[:5])
        yield starts


def _next_free(after: int, taken: Iterable[int]) -> int:
    """The first unit after a time whose place in the period is not taken."""
    places = {t % _PERIOD for t in taken}
    return next(t for t in range(after + 1, after + 1 + _PERIOD) if t % _PERIOD not in places)


def _repeat(starts: Integers, problem: Problem, table: PassTable) -> Integers:
    """The unit in which each pass starts (indexed as in `PassTable`) with one block every six units."""
    m, cells = problem.num_microbatches, table.num_cells
    units = np.empty(3 * cells, dtype=np.int64)
    for device, row in enumerate(starts):
        first, second = problem.placement.chunks_of(device)
        legs = (first * m, second * m, cells + second * m, cells + first * m, 2 * cells + second * m, 2 * cells + first * m)
        for leg, start in zip(legs, row, strict=True):
            units[leg : leg + m] = start + _PERIOD * np.arange(m)
    return units


def _order(units: Integers, table: PassTable) -> tuple[Integers, Integers]:
    """The passes of each device by unit, and where each device's part starts (`PassTable.encode`)."""
    owner = table.owner[: len(units)]
    return np.lexsort((units, owner)).astype(np.int64), np.searchsorted(np.sort(owner), np.arange(table.num_devices + 1))


@njit(cache=True, nogil=True)
def _move_up(units, sequence, owner, m, memory, room, warm, drained):  # pragma: no cover (compiled)
    """Move passes of the warm-up and the cool-down into earlier free units, as far as dependencies and memory let them.

    Args:
        units: the unit of each pass, changed in place.
        sequence: all passes by unit.
        owner, memory: device of each pass, and the bytes it adds.
        m: microbatches.
        room: bytes by device.
        warm, drained: units from and up to which nothing moves.
    """
    cells = len(units) // 3
    num_units = units.max() + 1
    taken = np.zeros((len(room), num_units), dtype=np.bool_)
    held = np.zeros((len(room), num_units))  # bytes after each unit
    for x in sequence:
        taken[owner[x], units[x]] = True
        held[owner[x], units[x]] = memory[x]
    for d in range(len(room)):
        held[d] = np.cumsum(held[d])
    for x in sequence:
        old, d, cell = units[x], owner[x], x % cells
        if warm <= old <= drained:
            continue
        earliest = units[x - 1] + 1 if x % m > 0 else 0
        if x >= cells:
            earliest = max(earliest, units[x - cells] + 1)
        if x < cells and cell >= m:
            earliest = max(earliest, units[x - m] + 1)
        if cells <= x < 2 * cells and cell + m < cells:
            earliest = max(earliest, units[x + m] + 1)
        new = old
        for unit in range(old - 1, earliest - 1, -1):
            if memory[x] > 0.0 and held[d, unit] + memory[x] > room[d]:
                break
            if not taken[d, unit]:
                new = unit
        taken[d, old], taken[d, new] = False, True
        held[d, new:old] += memory[x]
        units[x] = new


def _peaks(order: Integers, offsets: Integers, table: PassTable) -> tuple[float, ...]:
    return tuple(float(np.cumsum(part).max()) for part in np.split(table.memory[order], offsets[1:-1]))


def _fastest(problem: Problem, starts: Integers, budget: float) -> tuple[tuple[float, float], Integers, PassTable, Integers]:
    """A block's order, as it is or reworked by the true costs: (bytes over budget, seconds), order, table, offsets."""
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    units = _repeat(starts, problem, table)
    order, offsets = _order(units, table)
    room = tuple(max(budget, peak) for peak in _peaks(order, offsets, table))
    sequence = np.argsort(units, kind="stable")
    warm, drained = int(units[table.num_cells]), int(units[problem.num_microbatches - 1])  # first B, last F of chunk 0
    _move_up(units, sequence, table.owner, problem.num_microbatches, table.memory, np.array(room) * (1 + 1e-9), warm, drained)
    candidates = []
    for repeated in (order, _order(units, table)[0]):
        reworked = (rework(problem, table, repeated, offsets, room, from_drain) for from_drain in (False, True))
        for candidate in (repeated, *reworked):
            start, end = run_step(table, candidate, offsets)
            span = float((end[offsets[1:] - 1] - start[offsets[:-1]]).max())
            candidates.append(((max(0.0, *_peaks(candidate, offsets, table), budget), span), candidate))
    figures, order = min(candidates, key=lambda item: item[0])
    return figures, order, table, offsets


def _builder(slopes: Iterable[Slopes], share: float) -> Callable[[Problem], Schedule]:
    """A builder that takes the fastest of the blocks that hold no more than a share of 1f1b's memory and M_B."""

    def build(problem: Problem) -> Schedule:
        placement = problem.placement
        if placement != wave(placement.num_devices, 2):
            raise ValueError(
                f"this schedule needs two chunks per device in a V, not {list(placement.devices)}; "
                "for other placements use 'zb'"
            )
        budget = (share + 1 / placement.num_devices) * sum(c.activation_bytes for c in problem.chunk_costs)
        # blocks repeat, so a few microbatches tell which is the fastest
        short = replace(problem, num_microbatches=min(problem.num_microbatches, 3 * placement.num_devices))
        best = min(
            (starts for slope in slopes for starts in blocks(placement.num_devices, slope)),
            key=lambda starts: _fastest(short, starts, budget)[0],
        )
        _, order, table, offsets = _fastest(problem, best, budget)
        return table.decode(order, offsets)

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


register(_spec("v-half", ((2, 1, 2, 1), (1, 2, 1, 2)), 1 / 2, "(P/2 + 1) x M_B on every device"))
register(_spec("v-min", ((1, 1, 1, 1),), 1 / 3, "(P/3 + 1) x M_B on every device"))
