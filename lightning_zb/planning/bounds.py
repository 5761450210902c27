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

Where gradients are reduced over replicas, the reduction of one chunk of d follows its last pass; the shortest counts.

Where a whole BW takes less than B and W, an order may run some backwards whole. Each BW then counts as a B and a W that
together take no longer, of which only the W that directly follows may hold no memory (`lower_bounds(..., fuses=True)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique

from lightning_zb.planning.bound_kernel import NAMES, strongest_bounds
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
    seconds, devices = strongest_bounds(instance, fuses, objective is Objective.MAKESPAN)
    found = [
        Bound(name, float(value), int(device))
        for name, value, device in zip(NAMES, seconds, devices, strict=True)
        if value >= 0.0 and (objective is not Objective.PERIOD or name in ("work", "memory"))
    ]
    return tuple(sorted(found, key=lambda bound: -bound.seconds))


def lower_bound(instance: Instance, objective: Objective = Objective.STEP_TIME) -> Bound:
    """The strongest bound."""
    return lower_bounds(instance, objective)[0]
