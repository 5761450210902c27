"""Cuts that give every device its share of the work: quotas first, then descent by shifting runs of cuts.

A device may own several chunks, so what counts is the work of all of them together, over the device's speed; the
largest chunk does not. A chunk whose share is used up elsewhere (a device that has the head needs nothing else) ends up
empty and is dropped, which is how uneven numbers of chunks come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from lightning_zb.planning.budget import MemoryBudget, parse_bytes, per_device
from lightning_zb.planning.cooptimize.cut_rules import CutRules
from lightning_zb.planning.cooptimize.layout import Layout, tidy
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.random_stream import below


@dataclass(frozen=True, slots=True)
class Loads:
    """What descent looks at; prefix sums have one entry more than there are items.

    Args:
        work: prefix sums of F + B + W.
        overhead: seconds that the passes of a chunk take besides.
        need: prefix sums of the bytes that an item takes up however a step is ordered, by kind of device budget: nothing,
            activations of one microbatch, or these and model states. Shape (3, items + 1).
        kind: which of the three counts on each device.
        capacity: bytes of each device.
        speed: of each device.
        may_cut: by cut position.
        must_cut: likewise.
    """

    work: np.ndarray
    overhead: float
    need: np.ndarray
    kind: np.ndarray
    capacity: np.ndarray
    speed: np.ndarray
    may_cut: np.ndarray
    must_cut: np.ndarray

    @property
    def num_items(self) -> int:
        return len(self.work) - 1

    @property
    def ideal(self) -> float:
        """Seconds of a microbatch's work on every device, were all busy with one chunk each."""
        return float((self.work[-1] + self.overhead * len(self.speed)) / self.speed.sum())

    @property
    def floor(self) -> float:
        """Seconds of a microbatch's work on the busiest device at least: an item is not split."""
        return max(self.ideal, float((np.diff(self.work).max() + self.overhead) / self.speed.max()))

    def of(self, layout: Layout) -> np.ndarray:
        """Seconds of a microbatch's work on each device."""
        per_chunk = np.diff(self.work[list(layout.cuts)]) + self.overhead
        return np.bincount(layout.devices, weights=per_chunk, minlength=layout.num_devices) / self.speed

    def allows(self, layout: Layout) -> bool:
        """Whether every cut is where one may be, and one is wherever it must be."""
        inner = list(layout.cuts[1:-1])
        return bool(self.may_cut[inner].all()) and int(self.must_cut[inner].sum()) == int(self.must_cut.sum())

    def fits(self, layout: Layout) -> bool:
        """Whether every device can hold one microbatch of its chunks."""
        kinds = self.kind[list(layout.devices)]
        cuts = np.array(layout.cuts)
        need = np.bincount(layout.devices, weights=self.need[kinds, cuts[1:]] - self.need[kinds, cuts[:-1]])
        return bool((need <= self.capacity * (1.0 + 1e-9)).all())


def make_loads(costs: CostModel, num_devices: int, budget: MemoryBudget, rules: CutRules) -> Loads:
    """Prefix sums and limits of a problem; the budget is read as in `make_plan`."""
    entries = per_device(budget, num_devices)
    work = _prefix([layer.work for layer in costs.layers])
    activation = _prefix([layer.activation_bytes for layer in costs.layers])
    states = _prefix([layer.parameter_bytes if layer.state_bytes is None else layer.state_bytes for layer in costs.layers])
    capacity = [np.inf if e is None else parse_bytes(e) if isinstance(e, str) else e * activation[-1] for e in entries]
    may, must = np.ones(len(work), np.bool_), np.zeros(len(work), np.bool_)
    may[list(rules.forbidden)] = False
    must[list(rules.forced)] = True
    return Loads(
        work=work,
        overhead=costs.overhead.work,
        need=np.stack([np.zeros_like(work), activation, activation + states]),
        kind=np.array([0 if e is None else 2 if isinstance(e, str) else 1 for e in entries], np.int64),
        capacity=np.array(capacity, float),
        speed=np.array([costs.speed(d) for d in range(num_devices)], float),
        may_cut=may,
        must_cut=must,
    )


def _prefix(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])


def balance(loads: Loads, devices: Sequence[int]) -> Layout | None:
    """Cut the items anew for a sequence of devices so that all have equal work; chunks may vanish.

    Args:
        loads: of the problem.
        devices: device of each chunk, in model order.

    Returns:
        None where some device would be left without items.
    """
    cuts = _quota_cuts(loads, devices)
    return None if cuts is None else descend(loads, cuts, devices)


def level(loads: Loads, layout: Layout, stream: np.ndarray, kicks: int = 60) -> Layout:
    """Level the work further: again and again a few cuts are moved at random and descent starts from there.

    Args:
        loads: of the problem.
        layout: where to begin; what comes out is never more uneven.
        stream: of random numbers, advanced.
        kicks: how often.
    """
    best, least = layout, float(loads.of(layout).max())
    for _ in range(kicks):
        if least <= loads.floor * (1.0 + 1e-9) or len(best.counts) < 2:
            break
        found = descend(loads, _kicked(best.cuts, loads, stream), best.devices)
        if found is not None and loads.fits(found):
            largest = float(loads.of(found).max())
            if largest <= least:
                best, least = found, largest
    return best


def _kicked(cuts: Sequence[int], loads: Loads, stream: np.ndarray) -> list[int]:
    """One to three cuts moved by up to three items, where cuts may be."""
    moved = list(cuts)
    for _ in range(1 + below(stream, 3)):
        i = 1 + below(stream, len(cuts) - 2)
        at = min(max(moved[i] + below(stream, 7) - 3, 0), loads.num_items)
        if loads.may_cut[at] and not loads.must_cut[moved[i]]:
            moved[i] = at
    return sorted(moved)


def descend(loads: Loads, cuts: Sequence[int], devices: Sequence[int]) -> Layout | None:
    """Shift cuts as long as that levels the work; None where some device is left without items."""
    found = np.array(cuts, np.int64)
    unit = loads.speed * max(loads.ideal, 1e-300)
    _descend(
        found,
        np.array(devices, np.int64),
        loads.work[None, :] / unit[:, None],
        loads.overhead / unit,
        loads.need,
        loads.kind,
        loads.capacity,
        loads.may_cut,
        loads.must_cut,
    )
    return tidy(found.tolist(), devices, len(loads.speed))


def _quota_cuts(loads: Loads, devices: Sequence[int]) -> list[int] | None:
    """Cuts where each device's chunks get equal parts of its share of the work.

    The last item (the head) cannot be split: where it exceeds its device's share, the device gets nothing else and the
    others share the rest.
    """
    num_devices, num_items = len(loads.speed), loads.num_items
    if num_items < num_devices:
        return None
    total, head = float(loads.work[-1]), float(loads.work[-1] - loads.work[-2])
    last = devices[-1]
    share = total * loads.speed / loads.speed.sum()
    slots = np.bincount(devices, minlength=num_devices).astype(float)
    quota = (share / np.maximum(slots, 1.0))[list(devices)]
    if num_devices > 1 and head >= share[last]:
        rest = loads.speed.sum() - loads.speed[last]
        share = np.where(np.arange(num_devices) == last, 0.0, (total - head) * loads.speed / rest)
        quota = (share / np.maximum(slots, 1.0))[list(devices)]
        quota[-1] = head
    elif slots[last] > 1 and head > quota[-1]:
        others = [i for i, d in enumerate(devices) if d == last and i < len(devices) - 1]
        quota[others] = (share[last] - head) / len(others)
        quota[-1] = head
    wanted = np.cumsum(quota)[:-1]
    allowed = np.flatnonzero(loads.may_cut)
    at = loads.work[allowed]
    right = np.clip(np.searchsorted(at, wanted), 1, len(allowed) - 1)
    nearer = np.where(wanted - at[right - 1] <= at[right] - wanted, right - 1, right)
    cuts = [0, *allowed[nearer].tolist(), num_items]
    for position in np.flatnonzero(loads.must_cut).tolist():
        if position in cuts:
            continue
        free = [i for i in range(1, len(cuts) - 1) if not loads.must_cut[cuts[i]]]
        if not free:
            return None
        cuts[min(free, key=lambda i: abs(cuts[i] - position))] = position
        cuts.sort()
    return cuts


@njit(cache=True)
def _term(load, need, capacity):
    """What one device adds to the sum that descent lowers: its share of the ideal work, to the power 12."""
    cube = load * load * load
    over = need / capacity if capacity > 0.0 else 1e3
    return cube * cube * cube * cube + (1e6 * over if over > 1.0 else 0.0)


@njit(cache=True)
def _move(item_from, item_to, gives, takes, work, need, kind, loads, needs, counts):
    """Hand the items of a range from one device to another."""
    loads[gives] -= work[gives, item_to] - work[gives, item_from]
    loads[takes] += work[takes, item_to] - work[takes, item_from]
    needs[gives] -= need[kind[gives], item_to] - need[kind[gives], item_from]
    needs[takes] += need[kind[takes], item_to] - need[kind[takes], item_from]
    counts[gives] -= item_to - item_from
    counts[takes] += item_to - item_from


@njit(cache=True)
def _descend(cuts, devices, work, overhead, need, kind, capacity, may_cut, must_cut):
    """Shift runs of cuts to the next possible place, the steepest move first, until none lowers the sum.

    Shifting the cuts i..j together takes items from one end of the run and gives some to the other, so work can travel
    between devices that are not neighbours.

    Args:
        cuts: changed in place.
        devices: of each chunk.
        work: prefix sums for each device, in units of the ideal work of a device.
        overhead: of a chunk on each device, in the same units; a chunk that becomes empty keeps its own.
        need, kind, capacity, may_cut, must_cut: see `Loads`.
    """
    n, num_devices, num_positions = len(devices), len(capacity), len(may_cut)
    onward, back = np.full(num_positions, -1), np.full(num_positions, -1)
    last = -1
    for at in range(num_positions):
        back[at] = last
        if may_cut[at]:
            last = at
    last = -1
    for at in range(num_positions - 1, -1, -1):
        onward[at] = last
        if may_cut[at]:
            last = at
    loads, needs, counts = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices, np.int64)
    for c in range(n):
        d = devices[c]
        loads[d] += work[d, cuts[c + 1]] - work[d, cuts[c]] + (overhead[d] if cuts[c + 1] > cuts[c] else 0.0)
        needs[d] += need[kind[d], cuts[c + 1]] - need[kind[d], cuts[c]]
        counts[d] += cuts[c + 1] - cuts[c]
    terms = np.zeros(num_devices)
    for d in range(num_devices):
        terms[d] = _term(loads[d], needs[d], capacity[d])
    new_loads, new_needs, new_counts, new_terms = loads.copy(), needs.copy(), counts.copy(), terms.copy()
    for _ in range(64 * n):
        best, best_i, best_j, best_step = -1e-9, -1, -1, 0
        for step in (-1, 1):
            for i in range(1, n):
                new_loads[:], new_needs[:], new_counts[:], new_terms[:] = loads, needs, counts, terms
                change = 0.0
                for j in range(i, n):
                    here = cuts[j]
                    there = onward[here] if step > 0 else back[here]
                    if there < 0 or must_cut[here] or (step < 0 and j == i and there < cuts[i - 1]):
                        break
                    gives, takes = (devices[j], devices[j - 1]) if step > 0 else (devices[j - 1], devices[j])
                    if gives != takes:
                        change -= new_terms[gives] + new_terms[takes]
                        low, high = min(here, there), max(here, there)
                        _move(low, high, gives, takes, work, need, kind, new_loads, new_needs, new_counts)
                        new_terms[gives] = _term(new_loads[gives], new_needs[gives], capacity[gives])
                        new_terms[takes] = _term(new_loads[takes], new_needs[takes], capacity[takes])
                        change += new_terms[gives] + new_terms[takes]
                    if step > 0 and there > cuts[j + 1]:
                        continue  # only together with the next cut
                    if change < best and new_counts.min() > 0:
                        best, best_i, best_j, best_step = change, i, j, step
        if best_i < 0:
            return
        for j in range(best_i, best_j + 1):
            here = cuts[j]
            there = onward[here] if best_step > 0 else back[here]
            gives, takes = (devices[j], devices[j - 1]) if best_step > 0 else (devices[j - 1], devices[j])
            if gives != takes:
                _move(min(here, there), max(here, there), gives, takes, work, need, kind, loads, needs, counts)
            cuts[j] = there
        for d in range(num_devices):
            terms[d] = _term(loads[d], needs[d], capacity[d])
