"""`schedule="auto"` where the partition is given: choose the placement and the order.

Lower bounds rank the placements and rule out those that cannot win; the rest compete for work units, and every time the
better half goes on. Which steps there are depends on the seed alone, the effort only says how far to go, so more effort
never gives a worse plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_zb.planning.bounds import Objective, bounds_of_orders, meets
from lightning_zb.planning.budget import activation_limits, fits, infeasible
from lightning_zb.planning.builders.blocks import ALL_SLOPES, block_schedules
from lightning_zb.planning.builders.greedy import smallest_limits
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.fusing import fuse_backward
from lightning_zb.planning.less_memory import smaller_budgets
from lightning_zb.planning.partitioning import make_partition
from lightning_zb.planning.placement import Partition, Placement, cyclic, wave
from lightning_zb.planning.plan import Plan, PlanStatus
from lightning_zb.planning.planner import assemble_plan
from lightning_zb.planning.registry import Problem, SearchRequest, SearchSpec, find_schedule
from lightning_zb.planning.schedule import Schedule
from lightning_zb.planning.search import Searcher, SearchResult
from lightning_zb.planning.timeline import predict

DEFAULT_EFFORT = 28
"""Work units of `auto`, over all placements; see `search.DEFAULT_EFFORT` for what a unit is."""

MOST_PASSES_TO_REPEAT = 256
"""Problems up to that many passes are searched within smaller budgets too, each with the whole effort.

For those more memory is never worse. For larger ones only the schedules by name are monotone that the search begins with;
each smaller budget would cost as much as the search itself, and even first plans for one of them more than a tenth of it.
What the search adds may therefore be a little more at a smaller limit; whoever has the better plan can keep it, as it fits.
"""

MOST_CHUNKS_PER_DEVICE = 8  # more transfers than that never paid at the costs of the papers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement and the search for its order.

    Args:
        name: in words, such as `wave-4`.
        partition: layers to chunks.
        problem: what is to be ordered.
        searcher: the search.
    """

    name: str
    partition: Partition
    problem: Problem
    searcher: Searcher


def candidate_placements(num_devices: int, num_layers: int) -> dict[str, Placement]:
    """Sequential, V, waves and cyclic placements of as many chunks per device as the layers allow.

    Args:
        num_devices: devices of the pipeline.
        num_layers: stacked layers.
    """
    most = max(1, min(MOST_CHUNKS_PER_DEVICE, num_layers // num_devices))
    placements = {"sequential": cyclic(num_devices)}
    if num_devices == 1:
        return placements
    for v in range(2, most + 1):
        placements[f"wave-{v}"] = wave(num_devices, v)
    for v in range(2, most + 1):
        placements[f"cyclic-{v}"] = cyclic(num_devices, v)
    return placements


def find_best(
    candidates: list[Candidate], effort: int = DEFAULT_EFFORT, deadline: float | None = None, warm: bool = True
) -> Candidate:
    """Search several placements at once.

    Args:
        candidates: at least one.
        effort: work units over all of them.
        deadline: `time.perf_counter()` after which no step may end, judged by the speed of those before.
        warm: whether to begin with the schedules by name.

    Returns:
        The candidate of least value; its searcher holds the order.
    """
    best: Candidate | None = None
    spent = 0
    for candidate, units in _steps(candidates):
        if best is not None:
            if candidate.searcher.bound.seconds >= best.searcher.value:
                continue
            if spent + units > effort or (deadline is not None and time.perf_counter() > deadline):
                break
        searcher = candidate.searcher
        if units == 0:
            if warm:
                _offer_named(candidate)
            searcher.begin()
        else:
            before = searcher.units
            searcher.advance(before + units, deadline)
            spent += searcher.units - before
        if best is None or searcher.value < best.searcher.value:
            best = candidate
        if best.searcher.optimal and best.searcher.bound.seconds <= min(c.searcher.bound.seconds for c in candidates):
            break
    assert best is not None
    return best


def _steps(candidates: list[Candidate]) -> Iterator[tuple[Candidate, int]]:
    """What to do next: a candidate and the units to give it, 0 for its first plan.

    The V comes first, for a plan no worse than zb-v at once; then the others, the most promising bound first. Then the
    better half of what remains, again and again, each time with twice the units of the round before.
    """
    by_bound = sorted(candidates, key=lambda c: (c.name != "wave-2", c.searcher.bound.seconds))
    for candidate in by_bound:
        yield candidate, 0
    remaining = by_bound
    size = 1
    while True:
        value = min(c.searcher.value for c in remaining)
        remaining = sorted(
            (c for c in remaining if c.searcher.bound.seconds < value),
            # the first plans say little of what a placement can reach, its bound says the rest
            key=lambda c: (c.searcher.value + (c.searcher.bound.seconds if size < 4 else 0.0), c.searcher.bound.seconds),
        )
        remaining = remaining[: max(2, len(remaining) // 2)] if size < 8 else remaining[:2]
        if not remaining:
            return
        for candidate in remaining:
            yield candidate, 2 * size
        size *= 2


def _offer_named(candidate: Candidate) -> None:
    """Warm starts: the schedules by name that belong to the placement, and what repeats one block where memory is short."""
    name = {"wave-2": "zb-v", "sequential": "zb"}.get(candidate.name)
    if name is None:
        return
    problem, searcher = candidate.problem, candidate.searcher
    spec = find_schedule(name)
    assert not isinstance(spec, SearchSpec)
    searcher.offer(spec.build(problem))
    if name == "zb-v" and min(problem.limits) < problem.costs.activation_bytes:
        for schedule in block_schedules(problem, ALL_SLOPES, problem.limits):
            searcher.offer(schedule)


def plan_known_placements(request: SearchRequest) -> Plan:
    """Choose among the known placements, for the partition of the request."""
    options = dict(request.options)
    objective = Objective(options.pop("objective", Objective.STEP_TIME))
    effort, seed = int(options.pop("effort", DEFAULT_EFFORT)), int(options.pop("seed", 0))  # type: ignore[call-overload]
    seconds = options.pop("seconds", None)
    if options:
        raise ValueError(
            f"schedule 'auto' has no options {', '.join(sorted(options))}; it has objective, effort, seed, seconds"
        )
    started = time.perf_counter()
    candidates = make_candidates(request, seed, objective)
    deadline = None if seconds is None else started + float(seconds)  # type: ignore[arg-type]
    best = find_best(candidates, effort, deadline)
    result = best.searcher.result()
    if max(c.searcher.instance.num_passes for c in candidates) <= MOST_PASSES_TO_REPEAT:
        best, result = _try_less_memory(candidates, best, effort, seed, deadline)
    bound = _bound(best)  # the search's own holds where each backward is split
    other = min((c.searcher.bound.seconds for c in candidates if c is not best), default=result.bound.seconds)
    return assemble_plan(
        "auto",
        best.problem,
        best.partition,
        result.schedule,
        seconds=time.perf_counter() - started,
        status=result.outcome if bound >= result.bound.seconds else PlanStatus.FEASIBLE,
        lower_bound=bound if objective is Objective.STEP_TIME else None,
        reason=(
            f"placement {best.name} came out best of {', '.join(c.name for c in candidates)}, with {result.value:.6g} s of "
            f"{objective.value}; no order of it takes less than {result.bound.seconds:.6g} s ({result.bound.name} bound on "
            f"device {result.bound.device}), of the others {other:.6g} s"
        ),
    )


def _try_less_memory(
    candidates: list[Candidate], best: Candidate, effort: int, seed: int, deadline: float | None
) -> tuple[Candidate, SearchResult]:
    """Search within smaller budgets too: a plan of a small problem is never worse than one of a smaller eighth of memory.

    A plan that fits less memory fits more, but a search may miss it, or find one whose backwards cannot run whole, so orders
    count with those whole that gain by it. Bounds, which only grow as memory shrinks, end this.

    Returns:
        The candidate, and what was found for it.
    """
    result = best.searcher.result()
    figure = _with_whole_backwards(best, result)
    by_level: dict[float, list[Candidate]] = {}
    for candidate in candidates:
        for level in smaller_budgets(candidate.problem):
            problem = replace(candidate.problem, limits=level.limits)
            by_level.setdefault(level.budget, []).append(replace(candidate, problem=problem))
    for budget in sorted(by_level, reverse=True):
        lower = [new_candidate(c.name, c.partition, c.problem, seed, best.searcher.objective) for c in by_level[budget]]
        if min(_bound(c) for c in lower) >= figure:
            break
        found = find_best(lower, effort, deadline)
        other = found.searcher.result()
        value = _with_whole_backwards(found, other)
        if value < figure:
            best, result, figure = next(c for c in candidates if c.name == found.name), other, value
    bound = best.searcher.bound
    outcome = PlanStatus.OPTIMAL if meets(result.value, bound.seconds) else PlanStatus.FEASIBLE
    return best, replace(result, bound=bound, outcome=outcome)


def _with_whole_backwards(candidate: Candidate, result: SearchResult) -> float:
    """The value of what was found, with those backwards whole that gain by it."""
    problem = candidate.problem
    if all(c.saved_by_fusing <= 0.0 for c in problem.chunk_costs):
        return result.value
    arguments = (problem.placement, problem.chunk_costs, problem.costs)
    return getattr(predict(fuse_backward(result.schedule, *arguments), *arguments), candidate.searcher.objective.value)


def _bound(candidate: Candidate) -> float:
    """What no order takes less than, backwards split or whole."""
    problem = candidate.problem
    arguments = (problem.placement, problem.chunk_costs, problem.costs, problem.num_microbatches, problem.limits)
    return bounds_of_orders(*arguments, candidate.searcher.objective)[0].seconds


def new_candidate(
    name: str, partition: Partition, problem: Problem, seed: int, objective: Objective, warm_starts: Sequence[Schedule] = ()
) -> Candidate:
    """A candidate whose search has not begun; see `Candidate` and `search`."""
    searcher = Searcher(
        problem.placement,
        problem.chunk_costs,
        problem.costs,
        problem.num_microbatches,
        problem.limits,
        seed=seed,
        objective=objective,
        warm_starts=warm_starts,
    )
    return Candidate(name, partition, problem, searcher)


def make_candidates(request: SearchRequest, seed: int, objective: Objective) -> list[Candidate]:
    """The placements of a request that its memory allows, each with its search.

    Raises:
        InfeasibleBudget: no placement fits; says the smallest budget that would do for the one that needs least.
    """
    costs, budget = request.costs, request.memory_budget
    if request.placement is not None:
        placements = {"given": request.placement}
    else:
        placements = candidate_placements(request.num_devices, costs.num_stacked_layers)
    candidates, failures = [], []
    for name, placement in placements.items():
        partition = _partition(request.partition, costs, placement)
        if partition is None:
            continue
        limits = activation_limits(budget, costs, partition, placement)  # type: ignore[arg-type]
        problem = Problem(placement, costs.chunks(partition), costs, request.num_microbatches, limits)
        least = smallest_limits(problem)
        if not fits(least, limits):
            failures.append(
                (max(a - b for a, b in zip(least, limits, strict=True)), budget, least, costs, partition, placement)
            )
            continue
        candidates.append(new_candidate(name, partition, problem, seed, objective))
    if not candidates and not failures:
        chunks = ", ".join(str(n) for n in sorted({p.num_chunks for p in placements.values()}))
        raise ValueError(
            f"partition {list(request.partition)} has {len(request.partition)} chunks; "  # type: ignore[call-overload, arg-type]
            f"on {request.num_devices} devices schedule 'auto' tries placements of {chunks} chunks"
        )
    if not candidates:
        _, failed_budget, least, *where = min(failures, key=lambda f: f[0])
        raise infeasible(failed_budget, least, "one microbatch", *where)  # type: ignore[arg-type]
    return candidates


def _partition(spec: object, costs: CostModel, placement: Placement) -> Partition | None:
    """The partition for a placement, or None where explicit counts belong to another number of chunks."""
    if not isinstance(spec, str) and len(spec) != placement.num_chunks:  # type: ignore[arg-type]
        return None
    return make_partition(spec, costs, placement)  # type: ignore[arg-type]
