"""Schedules on the V placement: zb-v."""

from __future__ import annotations

from itertools import pairwise, product

from lightning_zb.planning.builders.greedy import Choices, list_order
from lightning_zb.planning.placement import wave
from lightning_zb.planning.registry import Problem, ScheduleSpec, register
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import run_step, tabulate


def best_list_schedule(problem: Problem) -> Schedule:
    """The list schedule with the smallest step_time over a grid of choices."""
    table = tabulate(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches)
    best = None
    for values in product((True, False), (0.0, 0.3, 0.6, 1.0), (0.0, 1.0, 2.0, 4.0, 6.0, 8.0), (True, False)):
        order, offsets = list_order(problem, Choices(*values), table)
        start, end = run_step(table, order, offsets)
        t = max(end[b - 1] - start[a] for a, b in pairwise(offsets))
        if best is None or t < best[0] - 1e-12:
            best = (t, order, offsets)
    assert best is not None
    return table.decode(best[1], best[2])


register(
    ScheduleSpec(
        name="zb-v",
        placement=lambda num_devices, num_layers: wave(num_devices, 2),
        build=best_list_schedule,
        assumption="T_F = T_B = T_W",
        memory="the given limit; P x M_B on every device by default",
        default_budget=1.0,
    )
)
