"""More memory never makes a plan worse: planners that are not monotone by themselves look at smaller limits too.

What fits less memory fits more, but a heuristic with more room may miss it. So every limit-driven builder tries all levels
of one fixed ladder that lie within its limits and keeps the best. Since the rungs do not depend on the limits, a larger
limit tries all that a smaller one does. Lower bounds, which only grow as memory shrinks, end this early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lightning_zb.planning.bounds import bounds_of_orders
from lightning_zb.planning.budget import fits
from lightning_zb.planning.builders.greedy import order_offsets, smallest_limits
from lightning_zb.planning.fusing import all_whole, fuse_backward, split_backward, whole_cost
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Integers, PassTable, spans, tabulate

_COARSE = (math.inf, 32.0, 8.0, 4.0, 3.0, 2.5, *(eighths / 8 for eighths in range(16, 0, -1)))
_FINE_ABOVE = 2.0  # from there on eighths, or M_B of a stage where that is less; up to the next number
_FINEST = 6.0
_LEAST_RUNGS, _MOST_RUNGS = 32, 64  # to the activations of the whole model, in steps of the mean M_B of a chunk where it can be

Builder = Callable[[Problem, bool], Integers]
"""From a problem, and whether its level is a coarse one that deserves more work, to the best flat order of F, B and W."""


@dataclass(frozen=True, slots=True)
class Level:
    """A rung of the ladder within the limits of a problem.

    Args:
        budget: what the tightest device may hold, as a multiple of the activations of the whole model.
        limits: activation bytes by device.
        is_coarse: whether it is one of the few that planners may spend more on.
    """

    budget: float
    limits: tuple[float, ...]
    is_coarse: bool


def ladder(problem: Problem) -> Iterator[Level]:
    """The levels within the limits of a problem, the largest first.

    All devices give up the same bytes, none goes below what it needs at least, and one without a limit keeps none. Budgets
    that differ by the same bytes on every device (one number, or one size, for all of them) therefore share their levels.

    Args:
        problem: its limits are at least `smallest_limits`.
    """
    whole = sum(c.activation_bytes for c in problem.chunk_costs)
    room = min(problem.limits)
    least = smallest_limits(problem)
    before: tuple[float, ...] = ()
    for rung in _rungs(problem.placement.num_chunks, problem.placement.num_devices):
        if rung * whole > room * (1.0 + 1e-9):
            continue
        lost = room - rung * whole if rung < math.inf else 0.0
        if room == math.inf > rung:
            limits = tuple(max(need, rung * whole) for need in least)
        else:
            limits = tuple(max(need, limit - max(0.0, lost)) for need, limit in zip(least, problem.limits, strict=True))
        if limits != before:
            yield Level(rung, limits, rung in _COARSE)
        if limits == least:
            return
        before = limits
    if before != least:
        yield Level(0.0, least, True)


def smaller_budgets(problem: Problem) -> Iterator[Level]:
    """The coarse levels below the limits of a problem as budgets: without those that some device cannot keep.

    Several placements are searched at each of them, and must be the same ones as where such a budget is asked for.

    Args:
        problem: its limits are at least `smallest_limits`.
    """
    whole = sum(c.activation_bytes for c in problem.chunk_costs)
    room = min(problem.limits)
    least = smallest_limits(problem)
    for rung in sorted(_COARSE, reverse=True):
        if rung * whole >= room * (1.0 - 1e-9):
            continue
        limits = tuple(rung * whole if room == math.inf else limit - (room - rung * whole) for limit in problem.limits)
        if fits(least, limits):
            yield Level(rung, limits, True)


def best_within(problem: Problem, build: Builder) -> Schedule:
    """The order of least step_time, then least makespan, that a builder makes of any level; backwards whole where that pays.

    Args:
        problem: its limits are at least `smallest_limits`.
        build: orders split backwards within the limits of a problem.
    """
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    best: tuple[Integers, Integers] | None = None
    figures = (np.inf, np.inf)
    for level in ladder(problem):
        lowered = replace(problem, limits=level.limits)
        arguments = (problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches, level.limits)
        if best is not None and bounds_of_orders(*arguments)[0].seconds >= figures[0] * (1.0 - 1e-9):
            break
        for order, offsets in _split_and_whole(lowered, build, level.is_coarse, table):
            found = spans(table, order, offsets)
            equal = abs(found[0] - figures[0]) <= 1e-9 * found[0]
            if best is None or (found[1] < figures[1] if equal else found[0] < figures[0]):
                best, figures = (order, offsets), found
    assert best is not None
    return table.decode(*best)


def _split_and_whole(
    problem: Problem, build: Builder, is_coarse: bool, table: PassTable
) -> Iterator[tuple[Integers, Integers]]:
    """Order split backwards and then fuse; where that saves something, also order whole ones and then split."""
    arguments = (problem.placement, problem.chunk_costs, problem.costs)
    offsets = order_offsets(problem)
    split = build(problem, is_coarse)
    if all(c.saved_by_fusing <= 0.0 for c in problem.chunk_costs):
        yield split, offsets
        return
    yield table.encode(fuse_backward(table.decode(split, offsets), *arguments))
    whole = build(replace(problem, chunk_costs=tuple(whole_cost(c) for c in problem.chunk_costs)), is_coarse)
    yield table.encode(fuse_backward(split_backward(all_whole(table.decode(whole, offsets)), *arguments), *arguments))


def _rungs(num_chunks: int, num_devices: int) -> list[float]:
    """All budgets of the ladder, the largest first."""
    split, joined = math.ceil(_LEAST_RUNGS / num_chunks), math.ceil(num_chunks / _MOST_RUNGS)
    per_whole = num_chunks * split / joined
    above = max(8, num_devices) if num_chunks == num_devices else 8
    fine = [k / per_whole for k in range(1, int(_FINE_ABOVE * per_whole))]
    fine += [k / above for k in range(int(_FINE_ABOVE * above), int(_FINEST * above))]
    return sorted({*_COARSE, *fine}, reverse=True)


def num_levels(problem: Problem) -> int:
    """How many levels the ladder has at most, whatever the limits."""
    return len(_rungs(problem.placement.num_chunks, problem.placement.num_devices))
