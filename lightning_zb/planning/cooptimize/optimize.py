"""The co-optimizer: partition, placement and schedule of a pipeline searched together (second paper, section Design).

Known layouts are scored and the promising ones tuned, bottleneck first; the best few then compete in the search for the
order of passes. Effort is counted in passes placed, so a seed and an effort give the same plan on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from lightning_zb.planning.auto import Candidate, find_best, new_candidate
from lightning_zb.planning.bounds import Objective, bounds_of_orders, meets
from lightning_zb.planning.budget import InfeasibleBudget, MemoryBudget, activation_limits, infeasible
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.cooptimize.balancing import make_loads
from lightning_zb.planning.cooptimize.climbing import Climb
from lightning_zb.planning.cooptimize.cut_rules import CutRules
from lightning_zb.planning.cooptimize.explanation import explanation
from lightning_zb.planning.cooptimize.layout import Layout
from lightning_zb.planning.cooptimize.phases import ALL_PHASES, Phase
from lightning_zb.planning.cooptimize.rivals import rivals
from lightning_zb.planning.cooptimize.scoring import Scorer
from lightning_zb.planning.cooptimize.starts import starting_layouts
from lightning_zb.planning.costs import CostModel, Link
from lightning_zb.planning.placement import Partition, Placement, cyclic
from lightning_zb.planning.plan import Plan, PlanStatus
from lightning_zb.planning.planner import assemble_plan
from lightning_zb.planning.random_stream import new_stream
from lightning_zb.planning.registry import Problem
from lightning_zb.planning.schedule import Schedule

DEFAULT_EFFORT = 28
"""Work units; of the search for the order of passes; a third as many go to layouts before."""

_PASSES_PER_UNIT = 700_000  # placed by the quick schedules of layouts, whose bounds and tables cost as much again
_PASSES_TO_TRY = 6_000  # of one chunk a device, over the layouts that get a first look
_NUM_CLIMBS = 3
_NUM_FINALISTS = 4


def cooptimize(
    costs: CostModel,
    num_devices: int,
    num_microbatches: int,
    memory_budget: MemoryBudget = None,
    *,
    phases: Collection[Phase | str] = ALL_PHASES,
    rules: CutRules = CutRules(),  # noqa: B008 (frozen)
    placement: Placement | None = None,
    objective: Objective | str = Objective.STEP_TIME,
    effort: int = DEFAULT_EFFORT,
    seed: int = 0,
    seconds: float | None = None,
) -> Plan:
    """Plan a pipeline, partition, placement and schedule together.

    Args:
        costs: the items, links and device speeds.
        num_devices: devices of the pipeline.
        num_microbatches: microbatches of a step.
        memory_budget: as in `make_plan`.
        phases: what may be fitted to the costs. Without the partition's layers are cut evenly, without the placement's each
            device has one chunk, without the schedule's the order is 1F1B with the backward whole.
        rules: what partitions must keep to.
        placement: one that is given.
        objective: what to minimise.
        effort: work units, see `DEFAULT_EFFORT`.
        seed: of the random choices.
        seconds: stop before a step that would end later than this; None for no cap.

    Raises:
        InfeasibleBudget: nothing fits the budget; says the smallest that does.
        ValueError: an argument is wrong; says what to write instead.
    """
    started = time.perf_counter()
    if effort < 0:
        raise ValueError(f"effort {effort} is negative; write 0 or more, the default is {DEFAULT_EFFORT}")
    deadline = None if seconds is None else started + seconds
    objective, chosen = Objective(objective), frozenset(Phase(phase) for phase in phases)
    loads = make_loads(costs, num_devices, memory_budget, rules)
    scorer = Scorer(costs, num_devices, num_microbatches, memory_budget, objective, Phase.SCHEDULE in chosen)
    stream = new_stream(seed)
    layouts = list(dict.fromkeys(starting_layouts(costs, loads, rules, chosen, placement, stream)))
    if not layouts:
        raise ValueError(_nothing_to_cut(costs, num_devices, rules))
    starts = sorted((s for s in map(scorer.score, layouts) if s is not None), key=lambda s: s.estimate)
    if not starts:
        raise _infeasible(layouts, scorer)
    tunable = chosen if placement is None else chosen - {Phase.PLACEMENT}
    climb = Climb(scorer, loads, tunable, _alike(costs, memory_budget), stream, deadline)
    share, begun = effort * _PASSES_PER_UNIT // 3, scorer.passes
    tops = [climb.tune(s, begun + share * (i + 1) // (2 * _NUM_CLIMBS)) for i, s in enumerate(starts[:_NUM_CLIMBS])]
    top = min(tops, key=lambda s: s.estimate)
    if chosen >= {Phase.PARTITION, Phase.PLACEMENT} and placement is None:
        top = climb.explore(top, begun + share)
    estimates = (starts[0].value, top.value)
    if Phase.SCHEDULE in chosen:
        finalists = _finalists(scorer, seed)
        winner = find_best(finalists, effort, deadline, warm=False)
        plan = _assemble(scorer, winner.problem, winner.partition, winner.searcher.result().schedule, started, estimates)
        for _, layout, schedule in rivals([*layouts, top.layout], scorer, value_of(plan, objective)):
            plan = _assemble(scorer, _problem(layout, scorer), layout.partition, schedule, started, estimates)
        return plan
    # judged by a short step, a placement of many chunks can look better than the sequential one, which costs nothing to keep
    contenders = [*scorer.best(_NUM_FINALISTS), *(s for s in starts if s.layout.placement == cyclic(num_devices))]
    quick = [(*scorer.quick_schedule(s.layout), s.layout) for s in contenders]
    _, schedule, layout = min(quick, key=lambda item: item[0])
    return _assemble(scorer, _problem(layout, scorer), layout.partition, schedule, started, estimates)


def _assemble(
    scorer: Scorer,
    problem: Problem,
    partition: Partition,
    schedule: Schedule,
    started: float,
    estimates: tuple[float, float],
) -> Plan:
    """The plan with its reason; optimal where its objective meets the bound of that."""
    arguments = (problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches, problem.limits)
    plan = assemble_plan("auto", problem, partition, schedule, time.perf_counter() - started)
    bound = bounds_of_orders(*arguments, scorer.objective)[0].seconds
    status = PlanStatus.OPTIMAL if meets(value_of(plan, scorer.objective), bound) else PlanStatus.FEASIBLE
    reason = explanation(plan, scorer.objective, bound, *estimates)
    return replace(plan, planner=replace(plan.planner, status=status, reason=reason))


def value_of(plan: Plan, objective: Objective) -> float:
    """The predicted seconds of that name."""
    return getattr(plan.predicted, objective.value)


def _problem(layout: Layout, scorer: Scorer) -> Problem:
    problem = scorer.problem(layout)
    assert problem is not None  # layouts that do not fit have no score
    return problem


def _finalists(scorer: Scorer, seed: int) -> list[Candidate]:
    """The layouts that the search for the order goes on with: the best at a first look at several, more of small problems."""
    size = 3 * scorer.num_microbatches * scorer.num_devices
    tried = [_candidate(s.layout, scorer, seed) for s in scorer.best(max(_NUM_FINALISTS, min(256, _PASSES_TO_TRY // size)))]
    for candidate in tried:
        candidate.searcher.begin()
    return sorted(tried, key=lambda candidate: candidate.searcher.value)[:_NUM_FINALISTS]


def _candidate(layout: Layout, scorer: Scorer, seed: int) -> Candidate:
    problem = _problem(layout, scorer)
    quick = scorer.quick_schedule(layout)[1]
    return new_candidate("layout", layout.partition, problem, seed, scorer.objective, [quick])


def _alike(costs: CostModel, budget: MemoryBudget) -> bool:
    """Whether devices can be exchanged without changing anything."""
    same_speed = costs.device_speed is None or len(set(costs.device_speed)) == 1
    same_budget = not isinstance(budget, (list, tuple)) or len(set(budget)) == 1
    return same_speed and same_budget and isinstance(costs.link, Link)


def _nothing_to_cut(costs: CostModel, num_devices: int, rules: CutRules) -> str:
    message = f"{num_devices} devices need as many chunks, and the model has {len(costs.layers)} items to cut"
    if rules.forbidden or rules.forced:
        message += f" ({len(rules.forbidden)} of the cuts between them forbidden, {len(rules.forced)} demanded)"
    return f"{message}; use fewer devices"


def _infeasible(layouts: list[Layout], scorer: Scorer) -> InfeasibleBudget:
    """The error that names the smallest budget, of the layout that lacks least."""
    worst = []
    for layout in layouts:
        partition, placement = layout.partition, layout.placement
        limits = activation_limits(scorer.budget, scorer.costs, partition, placement)
        problem = Problem(placement, scorer.costs.chunks(partition), scorer.costs, scorer.num_microbatches, limits)
        least = smallest_limits(problem)
        lacks = max(need - limit for need, limit in zip(least, limits, strict=True))
        worst.append((lacks, least, partition, placement))
    _, least, partition, placement = min(worst, key=lambda item: item[0])
    return infeasible(scorer.budget, least, "one microbatch", scorer.costs, partition, placement)
