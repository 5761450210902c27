"""Lower bounds: how fast any order of a placement can be within its memory, and which device says so.

Each bound argues over the span of one device d, from the start of its first pass, F(q0, 0) with q0 its first chunk (since
microbatches ascend), to the end of its last, and over what a device e (d itself or another) can run meanwhile. l is e's
last chunk. Nothing assumes equal chunks, equal devices or equal limits:

- work: d runs all its passes.
- chain: F(q0, 0) to the end of the model, back to B(q0, 0), and its W.
- warm-up: until e's first B, which is B(l, 0) and waits for the way to the last chunk and back, e can run only F, and
  only as many as its memory holds. The rest comes after it.
- cool-down: after e's last F, F(l, m-1), the way to the last chunk and back to B(q0, m-1) and its W remain, and during
  that e runs only B and W of what its memory held. The rest came before it.
- path: both at once, where e's memory does not hold all F: what fits neither before its first B nor after its last F
  runs between the two.
- memory: a microbatch occupies M_B from F to B and M_W from B to W; the occupied byte-seconds fit into limit x span.
- relay: from F(q0, 0) to e's first pass, then all that e runs up to its last B (W may stay behind as far as memory
  holds them), then back to B(q0, m-1).

Where a whole BW takes less than B and W, an order may run some backwards whole. Each BW then counts as a B and a W that
together take no longer, of which only the W that directly follows may hold no memory (`lower_bounds(..., fuses=True)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique

import numpy as np

from lightning_zb.planning.costs import ChunkCost, CostModel
from lightning_zb.planning.instance import Instance, build_instance
from lightning_zb.planning.placement import Placement


@unique
class Objective(str, Enum):
    """The figure that a search minimises; see `Prediction` for their meaning."""

    STEP_TIME = "step_time"
    PERIOD = "period"
    MAKESPAN = "makespan"


@dataclass(frozen=True, slots=True)
class Bound:
    """No order is faster.

    Args:
        name: which argument: work, chain, warm-up, cool-down, path, memory or relay.
        seconds: the bound.
        device: the device it argues over; the critical one where the bound is the largest of its name.
    """

    name: str
    seconds: float
    device: int


def meets(value: float, bound: float) -> bool:
    """Whether a value is its bound, up to the rounding of sums."""
    return abs(value - bound) <= 1e-9 * abs(bound)


@dataclass(frozen=True, slots=True)
class _Ways:
    """Lengths of ways through the model for one microbatch: `up[c]` from the start of F(0) to the start of F(c),
    `turn` from there to the end of the last F, `down[c]` from the end of the last F to the start of B(c)."""

    up: np.ndarray
    turn: float
    down: np.ndarray


def bounds_of_orders(
    placement: Placement,
    chunk_costs: Sequence[ChunkCost],
    costs: CostModel,
    num_microbatches: int,
    limits: Sequence[float] | None = None,
    objective: Objective = Objective.STEP_TIME,
) -> tuple[Bound, ...]:
    """The strongest bound of each kind over every order, backwards whole or split as it likes; strongest first.

    Args:
        placement: chunks to devices.
        chunk_costs: one cost per chunk, for a device of speed 1.
        costs: links and device speeds.
        num_microbatches: m.
        limits: activation bytes of each device, feasible; None for no limit.
        objective: what the bounds are of.
    """
    fuses = any(c.saved_by_fusing > 0.0 for c in chunk_costs)
    instance = build_instance(placement, [_at_least(c) for c in chunk_costs], costs, num_microbatches, limits)
    return lower_bounds(instance, objective, fuses)


def _at_least(cost: ChunkCost) -> ChunkCost:
    """B and W shortened so that together they take no longer than BW does."""
    if cost.saved_by_fusing <= 0.0:
        return cost
    backward_input = min(cost.backward_input, cost.whole_backward)
    return replace(
        cost, backward_input=backward_input, backward_weight=min(cost.backward_weight, cost.whole_backward - backward_input)
    )


def lower_bounds(instance: Instance, objective: Objective = Objective.STEP_TIME, fuses: bool = False) -> tuple[Bound, ...]:
    """The strongest bound of each kind, strongest first.

    Args:
        instance: the problem; limits must be feasible, see `minimum_memory`.
        objective: what the bounds are of. Of the period (long run, no barrier) only work and memory are bounds, since
            warm-up and cool-down of neighbouring steps overlap.
        fuses: whether a W may follow its B without holding memory in between, as within a BW.
    """
    ways = _ways(instance)
    loads = [_load(instance, d, fuses) for d in range(instance.num_devices)]
    best: dict[str, Bound] = {}
    for d in range(instance.num_devices):
        # an isolated step begins with F(0, 0); the device cannot start before that microbatch reaches it
        before = float(ways.up[loads[d].first]) if objective is Objective.MAKESPAN else 0.0
        for bound in _device_bounds(instance, ways, loads, d, fuses):
            if objective is Objective.PERIOD and bound.name not in ("work", "memory"):
                continue
            if bound.name not in best or bound.seconds + before > best[bound.name].seconds:
                best[bound.name] = Bound(bound.name, bound.seconds + before, bound.device)
    return tuple(sorted(best.values(), key=lambda b: -b.seconds))


def lower_bound(instance: Instance, objective: Objective = Objective.STEP_TIME) -> Bound:
    """The strongest bound."""
    return lower_bounds(instance, objective)[0]


def _ways(instance: Instance) -> _Ways:
    forward, backward = instance.duration[0], instance.duration[1]
    n = instance.num_chunks
    up, down = np.zeros(n), np.zeros(n)
    for c in range(1, n):
        up[c] = up[c - 1] + forward[c - 1] + instance.lag[0, c]
    for c in range(n - 2, -1, -1):
        down[c] = down[c + 1] + backward[c + 1] + instance.lag[1, c]
    return _Ways(up, float(up[-1] + forward[-1]), down)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a device runs in a step and how much of it memory lets it run before, and leave until after, its turning points.

    Args:
        first: its first chunk.
        last: its last chunk.
        work: seconds of all its passes.
        most_forward: the most seconds of F before its first B.
        most_backward: the most seconds of B and W after its last F.
        most_weight: the most seconds of W after its last B.
        holds_all: whether all F could come before the first B.
    """

    first: int
    last: int
    work: float
    most_forward: float
    most_backward: float
    most_weight: float
    holds_all: bool


def _load(instance: Instance, d: int, fuses: bool) -> _Load:
    m, own, limit = instance.num_microbatches, instance.chunks_of(d), float(instance.limit[d])
    activation, stash = instance.activation, instance.stash
    forward, _, weight = instance.duration
    return _Load(
        first=own[0],
        last=own[-1],
        work=float(m * instance.duration[:, own].sum()),
        most_forward=_fill(limit, [(float(activation[c]), float(forward[c])) for c in own], m),
        most_backward=_fill_backward(instance, d),
        # within a BW as the last backward, one W holds nothing
        most_weight=_fill(limit, [(float(stash[c]), float(weight[c])) for c in own], m) + fuses * float(weight[own].max()),
        holds_all=m * float(activation[own].sum()) <= limit,
    )


def _device_bounds(instance: Instance, ways: _Ways, loads: Sequence[_Load], d: int, fuses: bool) -> Iterable[Bound]:
    """Bounds of the span of device d."""
    m, own, limit = instance.num_microbatches, instance.chunks_of(d), float(instance.limit[d])
    first = own[0]
    backward, weight = instance.duration[1], instance.duration[2]
    end_of_last = float(backward[first] + weight[first])
    yield Bound("work", loads[d].work, d)
    yield Bound("chain", float(ways.turn - ways.up[first] + ways.down[first]) + end_of_last, d)
    if 0.0 < limit < np.inf:
        alive = ways.turn + ways.down - ways.up
        stash = np.zeros_like(instance.stash) if fuses else instance.stash
        occupied = float(sum(instance.activation[c] * alive[c] + stash[c] * backward[c] for c in own))
        yield Bound("memory", m * occupied / limit, d)
    for e, load in enumerate(loads):
        until_backward = ways.turn + float(ways.down[load.last] - ways.up[first])
        after_forward = ways.turn + float(ways.down[first] - ways.up[load.last] - instance.duration[0, load.last]) + end_of_last
        if not load.holds_all:
            between = max(0.0, load.work - load.most_forward - load.most_backward)
            yield Bound("path", until_backward + between + after_forward, e)
        if e == d:
            yield Bound("warm-up", load.work + max(0.0, until_backward - load.most_forward), e)
            yield Bound("cool-down", load.work + max(0.0, after_forward - load.most_backward), e)
        elif load.first > first:
            there = float(ways.up[load.first] - ways.up[first])
            back = float(ways.down[first] - ways.down[load.first] - backward[load.first]) + end_of_last
            yield Bound("relay", there + load.work - load.most_weight + back, e)
            yield Bound("warm-up", until_backward + max(0.0, load.work - load.most_forward - load.most_weight) + back, e)
            yield Bound("cool-down", there + max(0.0, load.work - load.most_backward) + after_forward, e)


def _fill(capacity: float, kinds: Sequence[tuple[float, float]], count: int) -> float:
    """The most seconds of work whose bytes fit, from `count` items of each (bytes, seconds) kind.

    Exact for equal sizes, otherwise the last item may be cut, which can only raise the result.
    """
    if capacity == np.inf:
        return count * sum(seconds for _, seconds in kinds)
    sizes = {size for size, _ in kinds}
    if len(sizes) == 1 and min(sizes) > 0.0:
        room = min(int(capacity / sizes.pop()), count * len(kinds))
        return _take_largest([seconds for _, seconds in kinds], room, count)
    return _cut_fill(capacity, [(size, seconds, count) for size, seconds in kinds])


def _take_largest(seconds: Sequence[float], room: int, count: int) -> float:
    total = 0.0
    for value in sorted(seconds, reverse=True):
        taken = min(count, room)
        total += taken * value
        room -= taken
    return total


def _cut_fill(capacity: float, kinds: Sequence[tuple[float, float, int]]) -> float:
    total = 0.0
    for size, seconds, count in sorted(kinds, key=lambda k: np.inf if k[0] == 0.0 else k[1] / k[0], reverse=True):
        share = 1.0 if size == 0.0 else min(1.0, max(0.0, capacity) / (size * count))
        total += share * count * seconds
        capacity -= share * count * size
    return total


def _fill_backward(instance: Instance, d: int) -> float:
    """The most B and W seconds that can remain on a device at the end of its last F.

    What remains is x microbatches that wait for B and W (M_B each) and y that wait for W alone (M_W each).
    """
    m = instance.num_microbatches
    own = instance.chunks_of(d)
    limit = float(instance.limit[d])
    both = [float(instance.duration[1, c] + instance.duration[2, c]) for c in own]
    alone = [float(instance.duration[2, c]) for c in own]
    if limit == np.inf:
        return m * sum(both)
    activation = {float(instance.activation[c]) for c in own}
    stash = {float(instance.stash[c]) for c in own}
    if len(activation) == len(stash) == 1 and min(activation) > 0.0:
        held, deferred = activation.pop(), stash.pop()
        everything = m * len(own)
        best = 0.0
        for x in range(min(int(limit / held), everything) + 1):
            rest = everything - x
            y = rest if deferred == 0.0 else min(int((limit - x * held) / deferred), rest)
            best = max(best, _take_largest(both, x, m) + _take_largest(alone, y, m))
        return best
    pending = [(float(instance.activation[c]), work, m) for c, work in zip(own, both, strict=True)]
    weights = [(float(instance.stash[c]), work, m) for c, work in zip(own, alone, strict=True)]
    return min(_cut_fill(limit, pending + weights), m * sum(both))
