"""Which backwards run whole: B directly followed by its own W becomes one BW where that helps.

A BW saves what splitting costs, but its gradient leaves only at its end. Memory never grows: what B and W hold between
them, BW does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.simulation import Integers, PassTable, run_step, tabulate

_PASSES_TO_RUN = 2e7
"""Passes simulated for a decision at most, a fraction of a second."""

_LEAST_TRIALS = 32


def fuse_backward(schedule: Schedule, placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel) -> Schedule:
    """Run backwards whole where that shortens the step; neither step_time nor makespan grows.

    Nothing waits for the gradient of chunk 0, nor, while W runs, for one that stays on the device: those pairs are fused
    at once. The others are tried all together, then by halves, and so on, as long as the trials last.

    Args:
        schedule: a complete order; its BW stay.
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1; those without a cost of BW keep their B and W.
        costs: gives links and device speeds.
    """
    if all(c.saved_by_fusing <= 0.0 for c in chunk_costs):
        return schedule
    table = tabulate(placement, chunk_costs, costs, schedule.num_microbatches)
    order, offsets = table.encode(schedule)
    pairs = _pairs(table, order, offsets, chunk_costs)
    chunk = order[pairs] % table.num_cells // table.num_microbatches
    below = np.array([-1, *placement.devices[:-1]])[chunk]
    waited_for = (below >= 0) & (below != np.array(placement.devices)[chunk])
    state = _Fusing(table, order, offsets, pairs[~waited_for])
    trials = max(_LEAST_TRIALS, int(_PASSES_TO_RUN / max(1, len(order))))
    blocks = [pairs[waited_for][np.argsort(order[pairs[waited_for]] % table.num_microbatches, kind="stable")]]
    while blocks and trials > 0:
        block = blocks.pop(0)
        if len(block) == 0:
            continue
        trials -= 1
        tried = _Fusing(table, order, offsets, np.union1d(state.fused, block))
        if tried.is_better_than(state):
            state = tried
        elif len(block) > 1:
            blocks += [block[: len(block) // 2], block[len(block) // 2 :]]
    return table.decode(*state.orders)


def _pairs(table: PassTable, order: Integers, offsets: Integers, chunk_costs: Sequence[ChunkCost]) -> Integers:
    """Where in the flat order a B stands whose W follows directly, and whose chunk gains by a BW."""
    cells = table.num_cells
    gains = np.array([c.saved_by_fusing > 0.0 for c in chunk_costs])
    here, following = order[:-1], order[1:]
    found = (here // cells == 1) & (following == here + cells) & gains[here % cells // table.num_microbatches]
    return np.flatnonzero(found)  # a W stands on the device of its B, so no pair reaches over the end of a device


@dataclass(slots=True)
class _Fusing:
    """The order with some pairs fused, and what that costs.

    Args:
        table: the passes.
        order: flat order with every pair apart.
        offsets: where each device's part of it starts.
        fused: places of the B of the fused pairs, ascending.
    """

    table: PassTable
    order: Integers
    offsets: Integers
    fused: Integers
    orders: tuple[Integers, Integers] = None  # type: ignore[assignment]
    step_time: float = 0.0
    makespan: float = 0.0
    total: float = 0.0

    def __post_init__(self) -> None:
        order = self.order.copy()
        order[self.fused] += 2 * self.table.num_cells
        offsets = self.offsets - np.searchsorted(self.fused, self.offsets)
        self.orders = order, offsets = np.delete(order, self.fused + 1), offsets
        last = np.zeros(self.table.num_devices)
        start, _ = run_step(self.table, order, offsets, last)
        first = start[offsets[:-1]]
        self.step_time, self.makespan = float((last - first).max()), float(last.max() - first.min())
        self.total = float((last - first).sum())

    def is_better_than(self, other: _Fusing) -> bool:
        """Whether no figure is worse and the devices together take less."""
        return self.step_time <= other.step_time and self.makespan <= other.makespan and self.total < other.total
