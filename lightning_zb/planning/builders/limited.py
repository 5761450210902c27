"""Schedules that keep to any memory limit by list scheduling: zb, zb-1p, zb-2p, zb-v and the waves.

Each is the best of what the list scheduler makes of several choices, as in the first paper (section 3.1), at any level of
memory within its limits. Lower bounds end the search early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np

from lightning_zb.planning.bounds import lower_bound
from lightning_zb.planning.builders.greedy import Choices, Detour, list_order, order_offsets
from lightning_zb.planning.builders.lockstep import lockstep_orders
from lightning_zb.planning.instance import build_instance
from lightning_zb.planning.less_memory import best_within, num_levels
from lightning_zb.planning.placement import cyclic, wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register, register_numbered
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Integers, PassTable, spans, tabulate

_CLOCKS = (
    (1, Detour.NONE),
    (2, Detour.NONE),
    (3, Detour.NONE),
    (1, Detour.LINKS),
    (1, Detour.RETURN),
    (2, Detour.RETURN),
    (0, Detour.NONE),
)
# Patience, which W go before F and B, and spare room; on the paper's costs the best of these was never more than
# .001 of bubble behind the best of all combinations.
_MANNERS: tuple[tuple[float, bool, bool, float], ...] = (
    *((1.0, first, True, 0.0) for first in (True, False)),
    *((0.8, first, True, 1.0) for first in (True, False)),
    *((patience, a, b, 1.0) for patience, a, b in product((1.0, 0.0), (True, False), (True, False))),
)
# Together these leave .001 on average over the costs of the paper, 13 budgets and three placements, and nothing at 1.0.
_FAVOURITES = (
    Choices(0, Detour.NONE, 0.0, True, True, 1.0, False),
    Choices(2, Detour.NONE, 0.0, False, True, 1.0, True),
    Choices(1, Detour.RETURN, 0.0, True, True, 1.0, False),
    Choices(2, Detour.NONE, 0.0, True, True, 1.0, False),
    Choices(3, Detour.NONE, 1.0, False, True, 1.0, False),
    Choices(2, Detour.RETURN, 1.0, False, True, 1.0, True),
    Choices(1, Detour.NONE, 0.0, True, False, 1.0, False),
    Choices(2, Detour.NONE, 1.0, False, True, 1.0, True),
    Choices(3, Detour.NONE, 1.0, True, True, 0.0, True),
    Choices(1, Detour.NONE, 0.0, False, False, 1.0, True),
    Choices(3, Detour.NONE, 0.0, False, True, 1.0, False),
    Choices(2, Detour.RETURN, 1.0, True, True, 1.0, True),
    Choices(3, Detour.NONE, 0.0, False, False, 1.0, True),
    Choices(2, Detour.NONE, 0.8, True, True, 1.0, True),
    Choices(1, Detour.LINKS, 0.8, False, True, 1.0, False),
    Choices(0, Detour.NONE, 0.0, False, True, 1.0, False),
)
GRID = tuple(
    dict.fromkeys(
        (
            *_FAVOURITES,
            *(
                Choices(resolution, detour, *manner, rounded_drain)
                for (resolution, detour), manner, rounded_drain in product(_CLOCKS, _MANNERS, (False, True))
                if resolution or not rounded_drain
            ),
        )
    )
)
"""What to choose from, the most useful first."""

# Passes to place at a coarse level, and at all fine ones together; a few choices are tried whatever the size.
_COARSE_PASSES, _FINE_PASSES = 1_500_000, 1_000_000
_FEWEST_COARSE, _FEWEST_FINE = 16, 6
_PASSES_BESIDE = 500  # that could be placed in the time that one order takes whatever its size


def best_list_schedule(problem: Problem) -> Schedule:
    """The best list schedule at any level of the ladder within the limits, backwards whole where that pays.

    Args:
        problem: its limits are at least `smallest_limits`.
    """
    return best_within(problem, _best_at)


def _best_at(problem: Problem, is_coarse: bool) -> Integers:
    """The list schedule of least step_time, then least makespan, at one level."""
    arguments = (problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    table = tabulate(*arguments)
    bound = lower_bound(build_instance(*arguments, problem.limits)).seconds
    passes = 3 * table.num_cells + _PASSES_BESIDE
    if is_coarse:
        count = max(_FEWEST_COARSE, _COARSE_PASSES // passes)
    else:
        count = max(_FEWEST_FINE, _FINE_PASSES // (passes * num_levels(problem)))
    offsets = order_offsets(problem)
    best_figures, best_order = (np.inf, np.inf), np.empty(0, dtype=np.int64)
    seen: set[bytes] = set()
    for order in _orders(problem, is_coarse, GRID[:count], table):
        if order.tobytes() in seen:
            continue
        seen.add(order.tobytes())
        figures = spans(table, order, offsets)
        equal = _about(figures[0], best_figures[0])
        if figures[1] < best_figures[1] if equal else figures[0] < best_figures[0]:
            best_figures, best_order = figures, order
        if _about(best_figures[0], bound):
            break
    return best_order


def _orders(problem: Problem, is_coarse: bool, grid: Iterable[Choices], table: PassTable) -> Iterator[Integers]:
    """What to choose from: the list schedules and, on a V at coarse levels, the rounds."""
    for choices in grid:
        yield list_order(problem, choices, table)[0]
    if is_coarse:
        yield from lockstep_orders(problem, table)


def _about(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * abs(a)


def _sequential(name: str, memory: str, own_budget: float | None = None) -> ScheduleSpec:
    return ScheduleSpec(
        name=name,
        placement=lambda num_devices, num_layers: cyclic(num_devices),
        build=best_list_schedule,
        assumption="any costs; first paper, section 3",
        memory=memory,
        own_budget=own_budget,
        default_budget=1.0,
    )


def _wave(chunks_per_device: int) -> ScheduleSpec:
    return ScheduleSpec(
        name=f"wave-{chunks_per_device}",
        placement=lambda num_devices, num_layers: wave(num_devices, chunks_per_device),
        build=best_list_schedule,
        assumption=f"{chunks_per_device} chunks per device that go down the devices and up again (Hanayo), any costs",
        memory="the given limit; P x M_B on every device by default",
        default_budget=1.0,
    )


register(_sequential("zb", "the given limit; P x M_B by default"))
register(_sequential("zb-1p", "P x M_B", own_budget=1.0))
register(_sequential("zb-2p", "2 P x M_B", own_budget=2.0))
register(
    ScheduleSpec(
        name="zb-v",
        placement=lambda num_devices, num_layers: wave(num_devices, 2),
        build=best_list_schedule,
        assumption="any costs, at its best where T_F = T_B = T_W; first paper, section 6",
        memory="the given limit; P x M_B on every device by default",
        default_budget=1.0,
    )
)
register_numbered("wave", _wave)
