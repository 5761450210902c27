"""Costs as the passes of a running plan show them: they may take longer, or less, than when layers were measured.

Devices that share cores, a chip or a memory slow each other down, the more so the less a plan waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_zb.model.layer_costs import at_cost
from lightning_zb.planning.costs import ChunkCost, CostModel, LayerCost, PassOverhead
from lightning_zb.planning.plan import Plan
from lightning_zb.profile_window import Profile


def seen_costs(plan: Plan, pass_seconds: Mapping[tuple[int, str], float]) -> CostModel:
    """The costs of a plan, layers scaled so that each pass of a chunk takes what it was seen to take under it.

    What layers of a chunk are to each other, the overhead of passes, bytes and links stay as they are. Where a chunk's B and W
    ran only as one, or only apart, what did not run is scaled alike.

    Args:
        plan: what ran, with the costs it was planned with.
        pass_seconds: by (chunk, "F", "B", "W" or "BW").
    """
    layers = list(plan.costs.layers)
    for chunk, items in enumerate(plan.partition.chunks):
        speed = plan.costs.speed(plan.placement.devices[chunk])
        seen = {part: s * speed for (c, part), s in pass_seconds.items() if c == chunk}
        factors = _factors(plan.costs.chunk(items), plan.costs.overhead, seen)
        for item in items:
            layers[item] = _scaled(layers[item], factors, knows_whole="BW" in seen)
    return replace(plan.costs, layers=tuple(layers))


def _factors(cost: ChunkCost, overhead: PassOverhead, seen: Mapping[str, float]) -> dict[str, float]:
    """For F, B, W and BW the share of their planned seconds that a chunk's layers now take."""
    besides = overhead.by_kind
    planned = {"F": cost.forward, "B": cost.backward_input, "W": cost.backward_weight, "BW": cost.whole_backward}
    planned = {part: seconds - besides[part] for part, seconds in planned.items()}
    now = {part: max(0.0, seconds - besides[part]) for part, seconds in seen.items()}
    found = {part: now[part] / planned[part] for part in now if planned[part] > 0.0}
    apart = [part for part in ("B", "W") if part in found]
    other = sum(now[part] for part in apart) / sum(planned[part] for part in apart) if apart else found.get("BW", 1.0)
    return {"F": 1.0, "B": other, "W": other, "BW": other, **found}


def _scaled(cost: LayerCost, factors: Mapping[str, float], knows_whole: bool) -> LayerCost:
    """A layer's costs times the factors; what B and W take as one stays unknown where it was not seen now or before."""
    is_known = knows_whole or cost.backward is not None
    return replace(
        cost,
        forward=cost.forward * factors["F"],
        backward_input=cost.backward_input * factors["B"],
        backward_weight=cost.backward_weight * factors["W"],
        backward=cost.whole_backward * factors["BW"] if is_known else None,
    )


def seen_profile(plan: Plan, found: Profile, before: Profile, takes_turns: bool) -> Profile:
    """What a window saw of a plan, with what was known of its layers.

    Args:
        plan: what ran.
        found: by the window, which timed no layers.
        before: with layers that were timed, and the bytes of this plan where the window counted none.
        takes_turns: whether the devices do, so that no pass runs beside another and costs are those from before.
    """
    costs = plan.costs if takes_turns else seen_costs(plan, found.running_seconds)
    items = tuple(at_cost(item, costs.layers[item.index]) for item in before.items)
    peak_bytes = found.peak_bytes if any(found.peak_bytes) else before.peak_bytes
    return replace(found, costs=costs, items=items, peak_bytes=peak_bytes)
