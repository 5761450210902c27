"""Which backwards run whole: a B directly followed by its own W, or one BW.

A BW saves what splitting costs, but its gradient leaves only at its end. Memory never grows by fusing: what B and W hold
between them, BW does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from lightning_zb.planning.costs import ChunkCost, CostModel, LayerCost
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule
from lightning_zb.planning.simulation import Integers, PassTable, ends_of_devices, tabulate

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
    state = _written_apart(schedule, tabulate(placement, chunk_costs, costs, schedule.num_microbatches))
    pairs = np.setdiff1d(_pairs(state), state.fused)
    pairs = pairs[np.array([c.saved_by_fusing > 0.0 for c in chunk_costs])[state.chunks_at(pairs)]]
    waited_for = _is_waited_for(placement)[state.chunks_at(pairs)]
    state = state.with_fused(np.union1d(state.fused, pairs[~waited_for]))
    return _improve(
        state, pairs[waited_for], lambda now, block: now.with_fused(np.union1d(now.fused, block)), _takes_less
    ).schedule


def split_backward(schedule: Schedule, placement: Placement, chunk_costs: Sequence[ChunkCost], costs: CostModel) -> Schedule:
    """Let B's gradient leave before W where that shortens the step; neither step_time nor makespan grows.

    Args:
        schedule: a complete order with BW; those of a chunk whose W holds more than its F stay, so that memory does not grow.
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1.
        costs: gives links and device speeds.
    """
    state = _written_apart(schedule, tabulate(placement, chunk_costs, costs, schedule.num_microbatches))
    lighter = np.array([c.weight_stash_bytes <= c.activation_bytes for c in chunk_costs])
    own = state.chunks_at(state.fused)
    pairs = state.fused[_is_waited_for(placement)[own] & lighter[own]]
    return _improve(state, pairs, lambda now, block: now.with_fused(np.setdiff1d(now.fused, block)), _ends_earlier).schedule


def with_whole_backwards(costs: CostModel) -> CostModel:
    """The costs of a model whose every backward runs whole: all of it in B, nothing in W."""
    overhead = replace(costs.overhead, backward_weight=0.0)
    return replace(costs, layers=tuple(whole_cost(c) for c in costs.layers), overhead=overhead)


_Cost = TypeVar("_Cost", LayerCost, ChunkCost)


def whole_cost(cost: _Cost) -> _Cost:
    """The cost of a layer or chunk whose every backward runs whole."""
    return replace(cost, backward_input=cost.whole_backward, backward_weight=0.0, weight_stash_bytes=0.0, backward=None)


def all_whole(schedule: Schedule) -> Schedule:
    """The order with BW in place of every B, and without W."""
    return Schedule(
        tuple(
            tuple(
                Pass(PassKind.BACKWARD, p.chunk, p.microbatch) if p.kind is PassKind.BACKWARD_INPUT else p
                for p in order
                if p.kind is not PassKind.BACKWARD_WEIGHT
            )
            for order in schedule.orders
        )
    )


@dataclass(frozen=True, slots=True)
class _Fusing:
    """An order with some of its backwards whole, and what that takes.

    Args:
        table: the passes.
        order: flat order with every pair written apart.
        offsets: where each device's part of it starts.
        fused: places of the B of the fused pairs, ascending.
    """

    table: PassTable
    order: Integers
    offsets: Integers
    fused: Integers
    step_time: float = field(init=False)
    makespan: float = field(init=False)
    total: float = field(init=False)

    def __post_init__(self) -> None:
        order, offsets = self._written()
        first, last = ends_of_devices(self.table, order, offsets)
        for name, value in (
            ("step_time", (last - first).max()),
            ("makespan", last.max() - first.min()),
            ("total", (last - first).sum()),
        ):
            object.__setattr__(self, name, float(value))

    def with_fused(self, fused: Integers) -> _Fusing:
        """The same order with other pairs fused."""
        return replace(self, fused=fused)

    def chunks_at(self, places: Integers) -> Integers:
        """The chunks of the passes at these places."""
        return self.order[places] % self.table.num_cells // self.table.num_microbatches

    @property
    def schedule(self) -> Schedule:
        return self.table.decode(*self._written())

    def _written(self) -> tuple[Integers, Integers]:
        order = self.order.copy()
        order[self.fused] += 2 * self.table.num_cells
        return np.delete(order, self.fused + 1), self.offsets - np.searchsorted(self.fused, self.offsets)


def _takes_less(new: _Fusing, old: _Fusing) -> bool:
    return new.step_time <= old.step_time and new.makespan <= old.makespan and new.total < old.total


def _ends_earlier(new: _Fusing, old: _Fusing) -> bool:
    now, before = (new.step_time, new.makespan), (old.step_time, old.makespan)
    return now != before and all(a <= b for a, b in zip(now, before, strict=True))


def _improve(
    state: _Fusing,
    pairs: Integers,
    change: Callable[[_Fusing, Integers], _Fusing],
    is_better: Callable[[_Fusing, _Fusing], bool],
) -> _Fusing:
    """Change all pairs together, or halves of them in the order of microbatches, and so on, where it is better."""
    m = state.table.num_microbatches
    blocks = [pairs[np.argsort(state.order[pairs] % m, kind="stable")]]
    trials = max(_LEAST_TRIALS, int(_PASSES_TO_RUN / max(1, len(state.order))))
    while blocks and trials > 0:
        block = blocks.pop(0)
        if len(block) == 0:
            continue
        trials -= 1
        tried = change(state, block)
        if is_better(tried, state):
            state = tried
        elif len(block) > 1:
            blocks += [block[: len(block) // 2], block[len(block) // 2 :]]
    return state


def _written_apart(schedule: Schedule, table: PassTable) -> _Fusing:
    """A schedule with each BW as a fused pair."""
    order, offsets = table.encode(schedule)
    cells = table.num_cells
    is_whole = order >= 3 * cells
    place = np.arange(len(order)) + np.cumsum(is_whole) - is_whole
    apart = np.repeat(order, 1 + is_whole)
    fused = place[is_whole]
    apart[fused] -= 2 * cells
    apart[fused + 1] -= cells
    return _Fusing(table, apart, offsets + np.concatenate([[0], np.cumsum(is_whole)])[offsets], fused)


def _pairs(state: _Fusing) -> Integers:
    """Where a B stands whose W follows directly; a W stands on the device of its B, so no pair reaches over a device's end."""
    here, following = state.order[:-1], state.order[1:]
    return np.flatnonzero((here // state.table.num_cells == 1) & (following == here + state.table.num_cells))


def _is_waited_for(placement: Placement) -> np.ndarray:
    """For each chunk whether another device waits for its gradient."""
    devices = np.array(placement.devices)
    return np.concatenate([[False], devices[1:] != devices[:-1]])
