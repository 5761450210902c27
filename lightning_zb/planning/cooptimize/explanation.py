"""Why the co-optimizer's plan is what it is, in words for its reader."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.cooptimize.phases import Phase, losses
from lightning_zb.planning.cooptimize.scoring import least_work
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.plan import Plan

_SHOWN = 5e-4  # of the step: what is less would be printed as 0.0 %

_MEANING = {
    Phase.PARTITION: "unequal work of the devices (partition)",
    Phase.PLACEMENT: "waits that no order of these chunks avoids (placement)",
    Phase.SCHEDULE: "waits that a better order might save (schedule)",
}


def explanation(plan: Plan, objective: Objective, bound: float, first: float, best: float) -> str:
    """What changing the layout brought, and what of the plan's time is work and what is lost.

    Args:
        plan: the co-optimizer's.
        objective: what was minimised.
        bound: seconds; no order of the plan's partition and placement takes less.
        first: estimated seconds of the best layout that was known without a search.
        best: estimated seconds of the best one after it.
    """
    before, after = f"{first:.4g}", f"{best:.4g}"
    if before == after:
        found = f"no change of cuts and devices bettered the first choice, estimated at {after} s"
    else:
        found = f"changing cuts and devices lowered the estimate from {before} to {after} s"
    value = getattr(plan.predicted, objective.value)
    if value <= 0.0:
        return found
    m, floor = plan.num_microbatches, plan.num_microbatches * _least_seconds(plan.costs, plan.num_devices)
    work = m * max(_seconds_by_device(plan))
    shares = {phase: s / value for phase, s in losses(value, max(bound, work), work, floor).items() if s / value >= _SHOWN}
    if not shares:
        return f"{found}; all of the plan's {objective.value} is work that no plan avoids"
    lost = ", ".join(f"{share:.1%} to {_MEANING[phase]}" for phase, share in shares.items())
    return f"{found}; {floor / value:.1%} of the plan's {objective.value} is work that no plan avoids, the rest is lost: {lost}"


def _least_seconds(costs: CostModel, num_devices: int) -> float:
    """A microbatch's work on the busiest device at least, however items are cut; backwards run whole where that is faster."""
    spent = costs.overhead
    overhead = spent.forward + spent.backward_input  # W's is not spent where the backward runs whole
    items = [c.forward + min(c.backward_input + c.backward_weight, c.whole_backward) for c in costs.layers]
    speeds = [costs.speed(d) for d in range(num_devices)]
    return max((sum(items) + overhead * num_devices) / sum(speeds), (max(items) + overhead) / max(speeds))


def _seconds_by_device(plan: Plan) -> Iterable[float]:
    """A microbatch's work on each device, backwards whole where that is faster."""
    for d in range(plan.num_devices):
        chunks = [plan.costs.chunk(plan.partition.chunks[c]) for c in plan.placement.chunks_of(d)]
        yield sum(map(least_work, chunks)) / plan.costs.speed(d)
