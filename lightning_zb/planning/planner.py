"""From costs to a plan: the one entry point of floor 1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning_zb.planning.bounds import Objective, bounds_of_orders, meets
from lightning_zb.planning.budget import MemoryBudget, activation_limits, check_budget, fits, infeasible
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.fusing import all_whole, fuse_backward, split_backward, with_whole_backwards
from lightning_zb.planning.layout_string import is_layout, read_layout
from lightning_zb.planning.partitioning import PartitionSpec, make_partition
from lightning_zb.planning.placement import Partition, Placement
from lightning_zb.planning.plan import Plan, PlannerInfo, PlanStatus
from lightning_zb.planning.registry import Problem, ScheduleSpec, SearchRequest, SearchSpec, find_schedule
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.timeline import memory_peaks, predict

_LOOKS = 6
"""A search with whole or with split backwards starts with a look at either: so many looks are the effort of a plan, and four
more where both are gone on with."""

_FEW_PASSES = 256  # of one chunk a device: a small problem, where the look decides only what is clear
_CLOSE = 1.03


def make_plan(
    costs: CostModel,
    num_devices: int,
    num_microbatches: int,
    schedule: str = "zb-v",
    memory_budget: MemoryBudget = None,
    partition: PartitionSpec | None = None,
    placement: Placement | Sequence[int] | None = None,
    **options: object,
) -> Plan:
    """Plan the pipeline of a model.

    Args:
        costs: the layers, links and device speeds.
        num_devices: devices of the pipeline.
        num_microbatches: microbatches of a step.
        schedule: a name from `known_schedules()`.
        memory_budget: a multiple of the activations of the whole model for one microbatch, a size such as `"40GiB"` for
            the whole device, a list of these, or None for the schedule's own default (no limit where it has none).
        partition: `"even"`, `"balanced"`, the number of layers of each chunk, or a layout as Megatron-LM writes it, such as
            `"Et*3|t*4|t*4|t*3L"`, which places chunks on the devices in turn; None (or `"auto"`): what `auto` finds best,
            and even for other schedules.
        placement: the device of each chunk; None: the placement that belongs to the schedule.
        options: handed on to a schedule that searches, such as `auto` (objective, effort, seed, seconds, constraints).

    Raises:
        InfeasibleBudget: nothing fits the budget; says the smallest that does.
        ValueError: an argument is wrong; says what to write instead.
    """
    if num_devices < 1 or num_microbatches < 1:
        raise ValueError(
            f"a pipeline needs a device and a microbatch, not {num_devices} devices and {num_microbatches} microbatches"
        )
    check_budget(memory_budget, num_devices)
    spec = find_schedule(schedule)
    if "constraints" in options and not isinstance(spec, SearchSpec):
        raise ValueError(f"constraints need a schedule that cuts the layers itself; write schedule 'auto', not {schedule!r}")
    if options and not isinstance(spec, SearchSpec):
        raise ValueError(f"schedule {schedule!r} has no options, but got {', '.join(sorted(options))}")
    if placement is not None and not isinstance(placement, Placement):
        placement = Placement(tuple(placement), num_devices)
    if isinstance(partition, str) and partition == "auto":
        partition = None
    if isinstance(partition, str) and is_layout(partition):
        if placement is not None:
            raise ValueError(f"layout {partition!r} places its chunks itself; drop the placement {list(placement.devices)}")
        cut, placement = read_layout(partition, costs, num_devices)
        partition = [len(chunk) for chunk in cut.chunks]
    request = SearchRequest(costs, num_devices, num_microbatches, memory_budget, partition, placement, dict(options))
    saves = costs.overhead.backward_weight > 0.0 or any(
        c.backward is not None and c.backward < c.backward_input + c.backward_weight for c in costs.layers
    )
    if isinstance(spec, ScheduleSpec):
        return _plan_named(spec, request)
    return _shorter_of_split_and_whole(spec, request) if saves else spec.plan(request)


def _shorter_of_split_and_whole(spec: SearchSpec, request: SearchRequest) -> Plan:
    """Order split backwards and then fuse, or order whole ones and then split: after a look at both whichever is faster.

    Neither is better throughout: where devices wait, W fill what would be idle; where they hardly do, BW is shorter. A small
    problem is searched in both ways where the look finds them close.
    """
    started = time.perf_counter()
    figure = Objective(request.options.get("objective", Objective.STEP_TIME)).value
    ways = (spec.plan, partial(_plan_whole, spec))
    look, rest = _with_share(spec, request, 1 / _LOOKS), _with_share(spec, request, 1 - len(ways) / _LOOKS)
    found = [(way(look), way) for way in ways]
    values = [getattr(plan.predicted, figure) for plan, _ in found]
    is_small = 3 * request.num_devices * request.num_microbatches <= _FEW_PASSES
    most = min(values) * (_CLOSE if is_small else 1.0)
    going = [way for value, (_, way) in zip(values, found, strict=True) if value <= most][: len(ways) if is_small else 1]
    if (seconds := rest.options.get("seconds")) is not None:
        rest.options["seconds"] = float(seconds) / len(going)  # type: ignore[arg-type]
    plans = [*(plan for plan, _ in found), *(way(rest) for way in going)]
    best = min(plans, key=lambda plan: getattr(plan.predicted, figure))
    return replace(best, planner=replace(best.planner, seconds=time.perf_counter() - started))


def _with_share(spec: SearchSpec, request: SearchRequest, share: float) -> SearchRequest:
    """The request with a share of its effort, whole units and one at least, and of the seconds it may take."""
    effort = int(request.options.get("effort", spec.default_effort))  # type: ignore[call-overload]
    options = {**request.options, "effort": min(effort, max(1, round(share * effort)))}
    if (seconds := request.options.get("seconds")) is not None:
        options["seconds"] = share * float(seconds)  # type: ignore[arg-type]
    return replace(request, options=options)


def _plan_whole(spec: SearchSpec, request: SearchRequest) -> Plan:
    """Plan as if no backward could be split, then split those that it pays for."""
    whole = spec.plan(replace(request, costs=with_whole_backwards(request.costs)))
    limits = (float("inf"),) * request.num_devices if whole.memory_limit is None else whole.memory_limit
    chunk_costs = request.costs.chunks(whole.partition)
    problem = Problem(whole.placement, chunk_costs, request.costs, request.num_microbatches, limits)
    return assemble_plan(
        spec.name,
        problem,
        whole.partition,
        split_backward(all_whole(whole.schedule), whole.placement, chunk_costs, request.costs),
        reason=f"planned with every backward whole: {whole.planner.reason}; then those were split that gain by it",
    )


def assemble_plan(
    name: str,
    problem: Problem,
    partition: Partition,
    schedule: Schedule,
    seconds: float = 0.0,
    status: PlanStatus | None = None,
    lower_bound: float | None = None,
    reason: str = "",
    fuses: bool = True,
) -> Plan:
    """Put the parts of a plan together, checked, with its prediction and the strongest bound of its step_time.

    Limits that are infinite count as none.

    Args:
        name: of the schedule.
        problem: what the schedule orders.
        partition: layers to chunks.
        schedule: the order.
        seconds: that planning took.
        status: what the planner proved; None: optimal where step_time meets its bound.
        lower_bound: of step_time, where the planner knows it already.
        reason: why this plan.
        fuses: whether to run backwards whole where that is faster; the schedule stays as it is otherwise.
    """
    schedule.check(problem.placement)
    arguments = (problem.placement, problem.chunk_costs, problem.costs)
    if fuses:
        schedule = fuse_backward(schedule, *arguments)
    if lower_bound is None:
        lower_bound = bounds_of_orders(*arguments, schedule.num_microbatches, problem.limits)[0].seconds
    predicted = predict(schedule, *arguments, lower_bound)
    if meets(predicted.step_time, lower_bound):
        predicted = replace(predicted, lower_bound=predicted.step_time)
    if status is None:
        status = PlanStatus.OPTIMAL if predicted.step_time == predicted.lower_bound else PlanStatus.FEASIBLE
    return Plan(
        costs=problem.costs,
        partition=partition,
        placement=problem.placement,
        schedule=schedule,
        predicted=predicted,
        planner=PlannerInfo(name=name, seconds=seconds, status=status, reason=reason),
        memory_limit=None if max(problem.limits) == float("inf") else problem.limits,
    )


def _plan_named(spec: ScheduleSpec, request: SearchRequest) -> Plan:
    started = time.perf_counter()
    costs, num_microbatches, placement = request.costs, request.num_microbatches, request.placement
    budget = _settle_budget(spec, request.memory_budget)  # type: ignore[arg-type]
    if placement is None:
        placement = spec.placement(request.num_devices, costs.num_stacked_layers)
    partition = make_partition(request.partition or "even", costs, placement)  # type: ignore[arg-type]
    limits = activation_limits(budget, costs, partition, placement)
    problem = Problem(placement, costs.chunks(partition), costs, num_microbatches, limits)
    if not spec.fixed_order and not fits(smallest_limits(problem), limits):
        raise infeasible(budget, smallest_limits(problem), "one microbatch", costs, partition, placement)
    schedule = spec.build(problem)
    peaks = memory_peaks(schedule, placement, problem.chunk_costs)
    if not fits(peaks, limits):
        raise infeasible(budget, peaks, f"schedule {spec.name!r}", costs, partition, placement)
    return assemble_plan(
        spec.name,
        problem,
        partition,
        schedule,
        time.perf_counter() - started,
        reason=f"schedule {spec.name!r} was asked for",
        fuses=spec.fixed_order,  # the others have chosen themselves
    )


def _settle_budget(spec: ScheduleSpec, budget: MemoryBudget) -> MemoryBudget:
    if spec.own_budget is None:
        return spec.default_budget if budget is None else budget
    if budget is not None and budget != spec.own_budget:
        raise ValueError(
            f"schedule {spec.name!r} is 'zb' at memory budget {spec.own_budget}; for {budget!r} write schedule 'zb'"
        )
    return spec.own_budget
