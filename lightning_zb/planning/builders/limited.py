"""Schedules that keep to any memory limit by list scheduling: zb, zb-1p, zb-2p, zb-v and the waves.

Each is the best of what the list scheduler makes of several choices, as in the first paper (section 3.1). Lower bounds
end the search early, and say whether the order of a smaller limit could still be the better one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from lightning_zb.planning.bounds import lower_bound
from lightning_zb.planning.budget import smaller_limits
from lightning_zb.planning.builders.greedy import Choices, Detour, list_order, smallest_limits
from lightning_zb.planning.instance import build_instance
from lightning_zb.planning.placement import cyclic, wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register, register_numbered
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import run_step, tabulate

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
GRID = tuple(
    Choices(resolution, detour, *manner, rounded_drain)
    for (resolution, detour), manner, rounded_drain in product(_CLOCKS, _MANNERS, (False, True))
    if resolution or not rounded_drain
)


def best_list_schedule(problem: Problem) -> Schedule:
    """The list schedule of least step_time, then least makespan, over `GRID`, at the given and some smaller limits.

    Args:
        problem: its limits are at least `smallest_limits`.
    """
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    best_figures, best_order = (np.inf, np.inf), np.empty(0, dtype=np.int64)
    for limits in _limits(problem):
        arguments = (problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches, limits)
        bound = lower_bound(build_instance(*arguments)).seconds
        if _about(bound, best_figures[0]) or bound > best_figures[0]:
            break
        seen: set[bytes] = set()
        for choices in GRID:
            order, offsets = list_order(replace(problem, limits=limits), choices, table)
            if order.tobytes() in seen:
                continue
            seen.add(order.tobytes())
            start, end = run_step(table, order, offsets)
            first, last = start[offsets[:-1]], end[offsets[1:] - 1]
            figures = (float((last - first).max()), float(last.max()))
            equal = _about(figures[0], best_figures[0])
            if figures[1] < best_figures[1] if equal else figures[0] < best_figures[0]:
                best_figures, best_order = figures, order
            if _about(best_figures[0], bound):
                break
    return table.decode(best_order, offsets)


def _about(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * abs(a)


def _limits(problem: Problem) -> Iterator[tuple[float, ...]]:
    """The limits, then smaller ones."""
    yield problem.limits
    whole = sum(c.activation_bytes for c in problem.chunk_costs)
    for _, limits in smaller_limits(problem.limits, smallest_limits(problem), whole):
        yield limits


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
