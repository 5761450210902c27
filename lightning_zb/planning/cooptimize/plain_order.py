"""The order that knows no costs: 1F1B on any placement, the backward whole, as far as memory allows.

It is what the phase of workload scheduling is compared with: list scheduling where every F, B and W takes the same time
and transfers none, B goes before F, and W follows its B at once.
"""

from __future__ import annotations

import numpy as np

from lightning_zb.planning.instance import build_instance, serial_order, to_schedule
from lightning_zb.planning.list_scheduling import Clock, list_schedule
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.schedule import Schedule


def plain_schedule(problem: Problem) -> Schedule:
    """Order a problem without looking at its times."""
    instance = build_instance(problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches, problem.limits)
    n = instance.num_chunks
    clock = Clock(np.ones((3, n)), np.zeros((2, n)), np.zeros((2, n)), 0, instance.num_microbatches, np.zeros(n))
    chunks = np.arange(n, dtype=float)
    period = 3.0 * n / instance.num_devices
    never = 10.0 * period * instance.num_microbatches
    urgency = np.stack([-chunks, -never - chunks, np.full(n, -2 * never)])
    order = np.empty(instance.num_passes, np.int32)
    if not list_schedule(instance, clock, urgency, period, never, 1.0, order):
        order = serial_order(instance)
    return to_schedule(instance, order).fused()
