"""The inner loop of every search: run given orders as early as they allow, on flat integer arrays.

A pass is an integer: `kind * num_cells + chunk * num_microbatches + microbatch` with kinds F, B, W, BW = 0, 1, 2, 3 and
`num_cells = num_chunks * num_microbatches`. F, B and W have the same numbers as in `instance`, from which the times
and memory of each chunk come. Searches build a `PassTable` once, then call `run_orders` as often as they like; everybody
else uses `lightning_zb.planning.timeline.simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.instance import KINDS, chunk_times
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

_KINDS = (*KINDS, PassKind.BACKWARD)
_KIND_INDEX = {kind: index for index, kind in enumerate(_KINDS)}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PassTable:
    """What is fixed of every pass before an order is chosen; arrays are indexed by pass.

    Args:
        num_chunks: chunks of the placement.
        num_microbatches: microbatches of a step.
        owner: device of the pass.
        duration: seconds, the device's speed included.
        successor: the F or B on the next chunk that waits for this pass (a BW that takes the B's place waits in its
            stead), or -1.
        lag: seconds from the end of the pass to the moment its successor may start.
        link: the link its output occupies, `source * num_devices + destination`, or -1 where transfers do not queue.
        occupancy: seconds its output occupies that link, 0 where transfers do not queue.
        memory: bytes the device holds more after the pass than before it.
        reduction: for each chunk the seconds of its gradients' reduction after its last W.
    """

    num_chunks: int
    num_microbatches: int
    num_devices: int
    owner: Integers
    duration: Floats
    successor: Integers
    lag: Floats
    link: Integers
    occupancy: Floats
    memory: Floats
    reduction: Floats

    @property
    def num_cells(self) -> int:
        return self.num_chunks * self.num_microbatches

    def index(self, p: Pass) -> int:
        return _KIND_INDEX[p.kind] * self.num_cells + p.chunk * self.num_microbatches + p.microbatch

    def encode(self, schedule: Schedule) -> tuple[Integers, Integers]:
        """The orders as one flat array of passes, and where each device's part starts (num_devices + 1 entries)."""
        offsets = np.cumsum([0] + [len(order) for order in schedule.orders])
        return np.array([self.index(p) for p in schedule.passes()], dtype=np.int64), offsets.astype(np.int64)

    def decode(self, order: Sequence[int] | Integers, offsets: Sequence[int] | Integers) -> Schedule:
        """The schedule that `encode` would turn into these arrays."""
        flat, bounds = np.asarray(order).tolist(), np.asarray(offsets).tolist()
        cells, m = self.num_cells, self.num_microbatches
        passes = [Pass(_KINDS[i // cells], i % cells // m, i % m) for i in flat]
        return Schedule(tuple(tuple(passes[a:b]) for a, b in pairwise(bounds)))


def tabulate(
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    num_microbatches: int,
    fifo_links: bool = False,
) -> PassTable:
    """Lay out the passes of a placement for `run_orders`.

    Args:
        placement: chunks to devices.
        chunk_costs: one for each chunk, for a device of speed 1.
        costs: gives links and device speeds.
        num_microbatches: microbatches of a step.
        fifo_links: let transfers of one ordered pair of devices follow each other, instead of not disturbing each other.
    """
    n, m, num_devices = placement.num_chunks, num_microbatches, placement.num_devices
    device = np.array(placement.devices, dtype=np.int64)
    (forward, backward, weight), lag, activation, stash, reduction = chunk_times(placement, chunk_costs, costs)
    whole = np.array([c.whole_backward / costs.speed(d) for c, d in zip(chunk_costs, placement.devices, strict=True)])
    down_lag, up_lag, down_occupancy, up_occupancy = np.zeros((4, n))
    down_lag[:-1], up_lag[1:] = lag[0, 1:], lag[1, :-1]  # here they stand with the pass that sends
    down_link, up_link = np.full((2, n), -1)
    for c, (here, there) in enumerate(pairwise(placement.devices) if fifo_links else ()):
        if here != there:
            size = chunk_costs[c].output_bytes  # the gradient that comes back has the size of the output
            down_occupancy[c] = size / costs.link_between(here, there).bandwidth
            up_occupancy[c + 1] = size / costs.link_between(there, here).bandwidth
            down_link[c], up_link[c + 1] = here * num_devices + there, there * num_devices + here

    cells = n * m
    cell = np.arange(cells)
    last, first, nothing = cell >= cells - m, cell < m, np.full(cells, -1)
    zeros = np.zeros(cells)

    def spread(*by_kind: NDArray) -> NDArray:
        return np.concatenate([np.repeat(values, m) for values in by_kind])

    below = np.where(first, -1, cells + cell - m)
    return PassTable(
        num_chunks=n,
        num_microbatches=m,
        num_devices=num_devices,
        owner=spread(device, device, device, device),
        duration=spread(forward, backward, weight, whole),
        successor=np.concatenate([np.where(last, -1, cell + m), below, nothing, below]).astype(np.int64),
        lag=np.concatenate([spread(down_lag, up_lag), zeros, spread(up_lag)]),
        link=np.concatenate([spread(down_link, up_link), nothing, spread(up_link)]).astype(np.int64),
        occupancy=np.concatenate([spread(down_occupancy, up_occupancy), zeros, spread(up_occupancy)]),
        memory=spread(activation, stash - activation, -stash, -activation),
        reduction=reduction,
    )


def run_step(
    table: PassTable,
    order: Integers,
    offsets: Integers,
    free: Floats | None = None,
    gate_position: Integers | None = None,
    gate_time: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Run one step and return start and end of every pass, indexed like `order`.

    Args:
        table: the passes.
        order: flat orders of all devices.
        offsets: where each device's part starts.
        free: when each device becomes free; changed in place to the end of its last pass, and of its last reduction. None: all
            at 0.
        gate_position: for each device the position in its order that also waits for `gate_time`.
        gate_time: seconds.

    Raises:
        ValueError: the orders wait for each other.
    """
    num_devices = table.num_devices
    free = np.zeros(num_devices) if free is None else free
    gate_position = np.full(num_devices, -1) if gate_position is None else gate_position
    gate_time = np.zeros(num_devices) if gate_time is None else gate_time
    start, end = np.empty(len(order)), np.empty(len(order))
    arrays = (table.owner, table.duration, table.successor, table.lag, table.link, table.occupancy)
    num_run = run_orders(order, offsets, *arrays, table.num_cells, free, gate_position, gate_time, start, end)
    if num_run < len(order):
        raise ValueError(f"the schedule deadlocks after {num_run} of its {len(order)} passes")
    for device, *_, finish in reductions(table, order, end):
        free[device] = max(free[device], finish)
    return start, end


def ends_of_devices(table: PassTable, order: Integers, offsets: Integers) -> tuple[Floats, Floats]:
    """When each device starts its first pass, and when its last pass and its last reduction have ended; as `run_step`."""
    last = np.zeros(table.num_devices)
    start, _ = run_step(table, order, offsets, last)
    return start[offsets[:-1]], last


def spans(table: PassTable, order: Integers, offsets: Integers) -> tuple[float, float]:
    """step_time and makespan of an order; as `run_step`."""
    first, last = ends_of_devices(table, order, offsets)
    return float((last - first).max()), float(last.max() - first.min())


def reductions(table: PassTable, order: Integers, end: Floats) -> list[tuple[int, int, float, float]]:
    """When gradients are reduced: device, chunk, start and end of each reduction, in the order in which they start.

    Args:
        table: the passes.
        order: flat orders of all devices.
        end: of each pass of `order`.
    """
    if not table.reduction.any():
        return []
    last = np.flatnonzero((order >= 2 * table.num_cells) & (order % table.num_microbatches == table.num_microbatches - 1))
    free: dict[int, float] = {}
    found = []
    for at in last[np.argsort(end[last], kind="stable")].tolist():
        device, chunk = int(table.owner[order[at]]), int(order[at] % table.num_cells // table.num_microbatches)
        start = max(float(end[at]), free.get(device, 0.0))
        free[device] = start + float(table.reduction[chunk])
        found.append((device, chunk, start, free[device]))
    return found


@njit(cache=True, nogil=True)
def run_orders(  # pragma: no cover (compiled)
    order, offsets, owner, duration, successor, lag, link, occupancy, num_cells, free, gate_position, gate_time, start, end
):
    """Run every pass as early as its device's order and its predecessor allow; each pass is visited once.

    A pass waits for the pass before it on its device and for one pass of a neighbouring chunk; F before B before W of
    the same chunk and microbatch is the order's own duty (`Schedule.check`). Times of one pass depend on nothing else,
    so the order in which devices are visited here does not matter.

    Args:
        order: (num_passes,) passes of device 0, then of device 1, ...
        offsets: (num_devices + 1,) where each device's part starts.
        owner, duration, successor, lag, link, occupancy, num_cells: see `PassTable`.
        free: (num_devices,) in: when the device may start; out: the end of its last pass.
        gate_position, gate_time: (num_devices,) position in the device's order that also waits for that time; -1 for none.
        start, end: (num_passes,) filled.

    Returns:
        The number of passes run; fewer than `len(order)` where the orders wait for each other.
    """
    num_devices = len(offsets) - 1
    arrival = np.zeros(3 * num_cells)  # when a pass's input is there, NaN until known; a BW reads its B's entry
    for i in range(len(order)):
        if successor[order[i]] >= 0:
            arrival[successor[order[i]]] = np.nan
    link_free = np.zeros(num_devices * num_devices)
    position = offsets[:-1].copy()
    runnable = np.arange(num_devices)
    num_runnable = num_devices
    waiting = np.zeros(num_devices, dtype=np.bool_)
    num_run = 0
    while num_runnable > 0:
        num_runnable -= 1
        device = runnable[num_runnable]
        while position[device] < offsets[device + 1]:
            at = position[device]
            here = order[at]
            ready = arrival[here if here < 3 * num_cells else here - 2 * num_cells]
            if np.isnan(ready):
                waiting[device] = True
                break
            begin = max(free[device], ready)
            if at - offsets[device] == gate_position[device]:
                begin = max(begin, gate_time[device])
            finish = begin + duration[here]
            start[at], end[at], free[device] = begin, finish, finish
            following = successor[here]
            if following >= 0:
                depart = finish
                if link[here] >= 0:
                    depart = max(finish, link_free[link[here]])
                    link_free[link[here]] = depart + occupancy[here]
                arrival[following] = depart + lag[here]
                other = owner[following]
                if waiting[other]:  # it may wait for another pass; then it goes back to waiting
                    waiting[other] = False
                    runnable[num_runnable] = other
                    num_runnable += 1
            position[device] = at + 1
            num_run += 1
    return num_run
