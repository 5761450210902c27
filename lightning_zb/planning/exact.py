"""Exact orders by constraint programming (OR-Tools CP-SAT, extra `exact`): proved optimum, or the best order and a bound.

Intervals on every device must not overlap, memory is a cumulative resource that a microbatch occupies from F to B and from
B to W, and microbatches ascend for every kind and chunk. The model is always warm-started: without a hint CP-SAT finds
nothing at some fifty passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_zb.planning.bounds import Objective, lower_bound
from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.instance import (
    Instance,
    build_instance,
    fits_memory,
    from_schedule,
    measure,
    minimum_memory,
    start_times,
    to_schedule,
)
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.plan import PlanStatus
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.search import search

_GRID = 1000  # the longest pass in integer time units; a finer grid slows the solver down a lot
_MEMORY_GRID = 10**9  # a limit in integer memory units


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What the solver proved.

    Args:
        status: optimal (to within `resolution`), feasible (the time ran out), or infeasible.
        schedule: the best order; None where infeasible.
        value: its step_time or makespan in seconds on the true times.
        bound: no order is faster than this many seconds, up to the rounding of times to `resolution`.
        resolution: seconds by which rounding may move the bound.
        message: one sentence for people.
    """

    status: PlanStatus
    schedule: Schedule | None
    value: float
    bound: float
    resolution: float
    message: str


def solve(
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    num_microbatches: int,
    limits: Sequence[float] | None = None,
    seconds: float = 60.0,
    objective: Objective | str = Objective.STEP_TIME,
    warm_start: Schedule | None = None,
    seed: int = 0,
) -> ExactResult:
    """Solve a small problem exactly.

    Args:
        placement: chunks to devices.
        chunk_costs: one cost per chunk, for a device of speed 1.
        costs: links and device speeds.
        num_microbatches: m.
        limits: activation bytes of each device; None for no limit.
        seconds: the solver's time.
        objective: step_time or makespan.
        warm_start: an order to begin with; None: what the search finds.
        seed: of the search and the solver.

    Raises:
        ValueError: the objective is the period, which has no exact model.
        ImportError: OR-Tools is missing.
    """
    objective = Objective(objective)
    if objective is Objective.PERIOD:
        raise ValueError("the exact solver minimises step_time or makespan, not period; use the search for that")
    instance = build_instance(placement, chunk_costs, costs, num_microbatches, limits)
    for d, least in enumerate(minimum_memory(instance)):
        if least > instance.limit[d]:
            message = f"device {d} needs {least:g} activation bytes for one microbatch and may hold {instance.limit[d]:g}"
            return ExactResult(PlanStatus.INFEASIBLE, None, np.inf, np.inf, 0.0, message)
    if warm_start is None:
        warm_start = search(
            placement, chunk_costs, costs, num_microbatches, limits, effort=2, seed=seed, objective=objective
        ).schedule
    incumbent = from_schedule(instance, warm_start)
    own_start = 0.0 if objective is Objective.MAKESPAN else 1.0
    value = measure(instance, incumbent, own_start)
    floor = lower_bound(instance, objective).seconds
    if value <= floor * (1.0 + 1e-9):
        return _result(instance, incumbent, value, floor, 0.0, proved=True)
    return _solve_model(instance, incumbent, own_start, seconds, seed, floor)


def _solve_model(
    instance: Instance, incumbent: np.ndarray, own_start: float, seconds: float, seed: int, floor: float
) -> ExactResult:
    from ortools.sat.python import cp_model

    n, m = instance.num_chunks, instance.num_microbatches
    unit = float(max(instance.duration.max(), instance.lag.max(), 1e-300)) / _GRID
    length = np.rint(instance.duration / unit).astype(np.int64)
    lag = np.rint(instance.lag / unit).astype(np.int64)
    start, ends = np.empty(instance.num_passes), np.empty(instance.num_devices)
    after = np.floor(instance.reduction / unit).astype(np.int64)
    rounded = instance._replace(duration=length.astype(float), lag=lag.astype(float), reduction=after.astype(float))
    if not start_times(rounded, incumbent, start, ends):
        raise ValueError("the warm start deadlocks; give one that passes Schedule.check")
    horizon = int(ends.max()) + 1

    model = cp_model.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in range(instance.num_passes)]
    for x, hint in enumerate(start):
        model.add_hint(begin[x], int(hint))

    def pass_id(kind: int, c: int, j: int) -> int:
        return (kind * n + c) * m + j

    for c in range(n):
        for j in range(m):
            f, b, w = (pass_id(kind, c, j) for kind in range(3))
            model.add(begin[b] >= begin[f] + length[0, c])
            model.add(begin[w] >= begin[b] + length[1, c])
            if c > 0:
                model.add(begin[f] >= begin[pass_id(0, c - 1, j)] + length[0, c - 1] + lag[0, c])
            if c < n - 1:
                model.add(begin[b] >= begin[pass_id(1, c + 1, j)] + length[1, c + 1] + lag[1, c])
            if j > 0:
                for kind in range(3):
                    model.add(begin[pass_id(kind, c, j)] >= begin[pass_id(kind, c, j - 1)] + length[kind, c])
    cost = model.new_int_var(int(max(0.0, floor / unit - instance.num_passes)), horizon, "cost")
    for d in range(instance.num_devices):
        own = instance.chunks_of(d)
        passes = [(pass_id(kind, c, j), int(length[kind, c])) for kind in range(3) for c in own for j in range(m)]
        model.add_no_overlap([model.new_fixed_size_interval_var(begin[x], size, "") for x, size in passes])
        first = begin[pass_id(0, own[0], 0)] if own_start else 0
        for c in own:  # a device ends with the W of the last microbatch of one of its chunks, and its reduction
            model.add(cost >= begin[pass_id(2, c, m - 1)] + int(length[2, c] + after[c]) - first)
        _limit_memory(model, instance, d, begin, pass_id, horizon)
    model.minimize(cost)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    order, value = incumbent, measure(instance, incumbent, own_start)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        times = np.array([solver.value(variable) for variable in begin])
        found = _order_by_time(instance, times)
        found_value = measure(instance, found, own_start)
        if found_value < value and fits_memory(instance, found):
            order, value = found, found_value
    resolution = unit * instance.num_passes
    bound = max(floor, min(value, solver.best_objective_bound * unit)) if status != cp_model.UNKNOWN else floor
    return _result(instance, order, value, bound, resolution, proved=value <= bound + resolution)


def _limit_memory(model, instance: Instance, d: int, begin, pass_id, horizon: int) -> None:
    """M_B from F to B and M_W from B to W within the limit, in whole units, rounded down: no order that fits is lost."""
    limit = float(instance.limit[d])
    if limit == np.inf:
        return
    scale = _MEMORY_GRID / limit
    intervals, demands = [], []
    for c in instance.chunks_of(d):
        for j in range(instance.num_microbatches):
            for kind, size in ((0, instance.activation[c]), (1, instance.stash[c])):
                begins, ends = begin[pass_id(kind, c, j)], begin[pass_id(kind + 1, c, j)]
                intervals.append(model.new_interval_var(begins, model.new_int_var(0, horizon, ""), ends, ""))
                demands.append(int(float(size) * scale))
    model.add_cumulative(intervals, demands, _MEMORY_GRID)


def _order_by_time(instance: Instance, times: np.ndarray) -> np.ndarray:
    """The flat order of given starts; passes of no length come before one that starts with them, F before B before W."""
    n, m = instance.num_chunks, instance.num_microbatches
    per_device: list[np.ndarray] = []
    kinds = np.arange(instance.num_passes) // (n * m)
    chunks = np.arange(instance.num_passes) // m % n
    for d in range(instance.num_devices):
        own = np.flatnonzero(instance.device[chunks] == d)
        depth = np.where(kinds[own] == 0, chunks[own], 2 * n - chunks[own]) + (kinds[own] == 2)
        lasts = instance.duration[kinds[own], chunks[own]] > 0.0
        per_device.append(own[np.lexsort((own, depth, lasts, times[own]))])
    return np.concatenate(per_device).astype(np.int32)


def _result(instance: Instance, order: np.ndarray, value: float, bound: float, resolution: float, proved: bool) -> ExactResult:
    status = PlanStatus.OPTIMAL if proved else PlanStatus.FEASIBLE
    message = f"{value:.6g} s; {status.message}" + ("" if proved else f" ({bound:.6g} s)")
    return ExactResult(status, to_schedule(instance, order), value, bound, resolution, message)
