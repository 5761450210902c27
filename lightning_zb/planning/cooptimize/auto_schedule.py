"""`schedule="auto"`: the co-optimizer, or a choice among known placements where the partition is given or all are alike."""

from __future__ import annotations

from dataclasses import replace

from lightning_zb.planning.auto import plan_known_placements
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.cooptimize.balancing import make_loads
from lightning_zb.planning.cooptimize.cut_rules import CutRules, read_constraints
from lightning_zb.planning.cooptimize.layout import layout_of
from lightning_zb.planning.cooptimize.optimize import DEFAULT_EFFORT, cooptimize
from lightning_zb.planning.cooptimize.starts import known_placements
from lightning_zb.planning.partitioning import even
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.registry import SearchRequest, SearchSpec, register

_OPTIONS = ("objective", "effort", "seed", "seconds", "constraints")


def _plan(request: SearchRequest) -> Plan:
    options = dict(request.options)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"schedule 'auto' has no options {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
    rules = read_constraints(options.pop("constraints", None), request.costs)  # type: ignore[arg-type]
    if request.partition is not None:
        if rules != CutRules():
            raise ValueError("constraints say how to cut the layers, and so does the partition; drop one of the two")
        return plan_known_placements(replace(request, options=options))
    if rules == CutRules() and request.placement is None and _are_alike(request):
        return plan_known_placements(replace(request, partition="even", options=options))
    seconds = options.get("seconds")
    return cooptimize(
        request.costs,
        request.num_devices,
        request.num_microbatches,
        request.memory_budget,  # type: ignore[arg-type]
        rules=rules,
        placement=request.placement,
        objective=Objective(options.get("objective", Objective.STEP_TIME)),
        effort=int(options.get("effort", DEFAULT_EFFORT)),  # type: ignore[call-overload]
        seed=int(options.get("seed", 0)),  # type: ignore[call-overload]
        seconds=None if seconds is None else float(seconds),  # type: ignore[arg-type]
    )


def _are_alike(request: SearchRequest) -> bool:
    """Whether an even cut of some known placement leaves every device the same work and the same bytes."""
    costs, num_devices = request.costs, request.num_devices
    speeds = {costs.speed(d) for d in range(num_devices)}
    if len(speeds) > 1:
        return False
    loads = make_loads(costs, num_devices, request.memory_budget, CutRules())  # type: ignore[arg-type]
    for placement in known_placements(num_devices, costs.num_stacked_layers).values():
        if costs.num_stacked_layers < placement.num_chunks:
            continue
        work = loads.of(layout_of(even(costs, placement.num_chunks), placement))
        if work.max() <= loads.ideal * (1.0 + 1e-6):
            return True
    return False


register(
    SearchSpec(
        name="auto",
        plan=_plan,
        assumption="any costs; cuts layers and places chunks as they come out best, unless told otherwise",
        memory="the given limit; what the devices have by default",
        default_effort=DEFAULT_EFFORT,
    )
)
