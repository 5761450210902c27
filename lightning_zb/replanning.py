"""Whether another plan is worth it, once layers and links have been measured, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_zb.plan_choice import Replan
from lightning_zb.planning.budget import InfeasibleBudget, MemoryBudget, activation_limits, fits, infeasible
from lightning_zb.planning.compiling import compile_search
from lightning_zb.planning.cooptimize.cut_rules import read_constraints
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.partitioning import PartitionSpec
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import SearchSpec, find_schedule
from lightning_zb.planning.timeline import predict_with
from lightning_zb.terms import Terms

_WORSE = 0.05
"""Share by which a step must take longer than before for a new plan to be given up; steps vary by less."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs from now on.

    Args:
        plan: with measured costs; the running one where nothing better was found.
        change: what it changes: "nothing", "costs" of the running plan, "order", "partition" or "placement".
        reason: one sentence.
        seconds: what planning took.
    """

    plan: Plan
    change: str
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A decision as it is remembered: the optimizer steps done before it, and `Decision`'s fields but for the plan."""

    step: int
    change: str
    reason: str
    seconds: float


def repriced(plan: Plan, costs: CostModel, budget: MemoryBudget) -> Plan:
    """The same plan with measured costs, its prediction and limits made anew.

    Args:
        plan: what runs.
        costs: measured.
        budget: activation memory asked for; None for no limit.
    """
    priced = replace(plan, costs=costs, predicted=predict_with(plan, costs))
    return replace(priced, memory_limit=_limits(budget, priced))


def step_seconds(runs_ahead: bool) -> Callable[[Plan], float]:
    """Which figure of a plan says what a step takes, one after another.

    Args:
        runs_ahead: whether devices begin a step before the others have ended the one before.
    """
    return lambda plan: plan.predicted.period if runs_ahead else plan.predicted.makespan


def decide(running: Plan, costs: CostModel, terms: Terms) -> Decision:
    """Plan with measured costs and compare.

    Args:
        running: what runs, whatever costs it was made for.
        costs: measured.
        terms: what a new plan may change and must keep to.

    Raises:
        InfeasibleBudget: nothing fits a budget that must be kept; says the smallest that does.
    """
    if terms.replan is Replan.PLACEMENT:
        compile_search()
    started = time.perf_counter()
    now = repriced(running, costs, terms.budget)
    best, refusals = _find_best(now, terms, deadline=started + terms.seconds)
    decision = _weigh(now, best, refusals, terms)
    return replace(decision, seconds=time.perf_counter() - started)


def _find_best(now: Plan, terms: Terms, deadline: float) -> tuple[Plan | None, list[ValueError | str]]:
    """The fastest of all plans that may take the running one's place, and why there are not more of them."""
    costs, figure = now.costs, step_seconds(terms.runs_ahead)
    rules = read_constraints(terms.constraints, costs)
    best: Plan | None = None
    refusals: list[ValueError | str] = []
    candidates = list(_candidates(now, terms))
    searches = sum(isinstance(find_schedule(name), SearchSpec) for name, *_ in candidates)
    for name, partition, keeps_placement in candidates:
        left = deadline - time.perf_counter()
        if left <= 0:
            refusals.append("the time for planning is over")
            break
        options: dict[str, object] = {}
        room = terms.budget
        if isinstance(find_schedule(name), SearchSpec):
            room = _at_most(terms.budget, terms.most)
            options["seconds"] = left / searches
            searches -= 1
            if terms.constraints and partition is None:
                options["constraints"] = terms.constraints
        placement = now.placement if keeps_placement else None
        try:
            plan = make_plan(costs, now.num_devices, now.num_microbatches, name, room, partition, placement, **options)
        except ValueError as error:
            refusals.append(error)
            continue
        if terms.joins_ends and plan.placement.devices[0] != plan.placement.devices[-1]:
            continue
        if not rules.allows(plan.partition):
            continue
        if room is not terms.budget:
            plan = replace(plan, memory_limit=_limits(terms.budget, plan))
        if best is None or figure(plan) < figure(best):
            best = plan
    return best, refusals


def _weigh(now: Plan, best: Plan | None, refusals: Sequence[ValueError | str], terms: Terms) -> Decision:
    """Whether the best plan is worth changing to, and why."""
    over = now.memory_limit is not None and not fits(now.predicted.peak_bytes, now.memory_limit)
    if best is None:
        if over and terms.must_fit and terms.replan is not Replan.OFF:
            _refuse_budget(now, refusals, terms)
        why = str(refusals[0]) if refusals else f"{terms.schedule} has one order only"
        if terms.replan is Replan.OFF:
            why = "re-planning is off"
        return Decision(now, "nothing", f"{why}; the running plan stays")
    figure = step_seconds(terms.runs_ahead)
    gain = 1 - figure(best) / figure(now)
    if not over and gain < terms.min_gain:
        found = f"{best.planner.name} would save {100 * gain:.1f} % of a step" if gain > 0 else "nothing faster was found"
        found += "".join(f"; not possible: {refusal}" for refusal in dict.fromkeys(map(str, refusals)))
        return Decision(now, "nothing", f"{found}; the running plan stays")
    what = changed(now, best)
    why = "the running plan exceeds the memory limit" if over else f"saves {100 * gain:.1f} % of a step by prediction"
    return Decision(best, what, f"{best.planner.name}, new {what}: {why}")


def _refuse_budget(now: Plan, refusals: Sequence[ValueError | str], terms: Terms) -> None:
    """Raise what names the smallest budget: the refusal of a schedule that takes budgets, or what a fixed order needs.

    Args:
        now: the running plan with measured costs.
        refusals: why others cannot run; where none is about the budget, nothing is known of what would fit.
        terms: what a new plan may change and must keep to.
    """
    for refusal in refusals:
        if isinstance(refusal, InfeasibleBudget):
            raise refusal
    if next(_candidates(now, terms), None) is None:
        peaks, what = now.predicted.peak_bytes, f"schedule {now.planner.name!r}"
        raise infeasible(terms.budget, peaks, what, now.costs, now.partition, now.placement)


def _limits(budget: MemoryBudget, plan: Plan) -> tuple[float, ...] | None:
    """What a budget leaves each device for activations; None where there is none."""
    return None if budget is None else activation_limits(budget, plan.costs, plan.partition, plan.placement)


def _at_most(budget: MemoryBudget, most: float | None) -> MemoryBudget:
    """The budget of what is left, as multiples, no larger than a search can use."""
    if most is None or isinstance(budget, (int, float, str)):
        return budget
    return most if budget is None else [b if isinstance(b, str) else min(b, most) for b in budget]


def go_back(running: Plan, took: float, before: Plan, took_before: float) -> Decision | None:
    """Back to the plan before, where steps take longer with the new one: costs may have been measured in a bad moment.

    A plan that was left because it exceeds the memory limit stays left.

    Args:
        running: the new plan.
        took: seconds that its step was measured to take.
        before: the plan before.
        took_before: seconds of its step.
    """
    exceeds = before.memory_limit is not None and not fits(before.predicted.peak_bytes, before.memory_limit)
    if exceeds or took <= (1 + _WORSE) * took_before:
        return None
    reason = f"{before.planner.name} again: a step took {took_before:.4g} s with it, {took:.4g} s with {running.planner.name}"
    return Decision(before, changed(running, before), reason)


def price_again(running: Plan, priced: Plan, took: float | None, least: float) -> Decision:
    """The running plan with costs as they are now, to be predicted truly.

    Args:
        running: with the costs it was planned with.
        priced: the same plan with costs as they are now.
        took: seconds of a step as measured; None where it is not known.
        least: share of a step's time that is worth a word.
    """
    expected, now = running.predicted.makespan, priced.predicted.makespan
    is_other = abs(now - expected) >= least * expected
    measured = "" if took is None else f"a step takes {took:.4g} s, "
    reason = f"{measured}{expected:.4g} s were predicted, {now:.4g} s are with what its passes take now"
    return Decision(priced, "costs" if is_other else "nothing", reason)


def changed(old: Plan, new: Plan) -> str:
    """What is another in the new plan: "placement", "partition", or else "order"."""
    if new.placement != old.placement:
        return "placement"
    return "partition" if new.partition != old.partition else "order"


def _candidates(now: Plan, terms: Terms) -> Iterator[tuple[str, PartitionSpec | None, bool]]:
    """Schedule name, partition (None: the schedule's choice), and whether the running placement is kept."""
    replan, schedule = terms.replan, terms.schedule
    counts = tuple(len(chunk) for chunk in now.partition.chunks)
    name = _orderer(schedule, now.planner.name)
    if replan is Replan.OFF:
        return
    if replan is Replan.PLACEMENT:  # first, so that it has the time
        yield "auto", None, False
    if name is not None:
        yield name, counts, True
    if replan in (Replan.PARTITION, Replan.PLACEMENT):
        for partition in ("balanced", "even"):
            yield name or schedule, partition, True
    if replan is Replan.PLACEMENT:
        yield "1f1b", "balanced", False


def _orderer(*names: str) -> str | None:
    """The first of these schedules whose order depends on costs; None where a fixed order was asked for."""
    for name in names:
        try:
            spec = find_schedule(name)
        except ValueError:  # a plan file, or a plan of another origin
            continue
        return None if spec.fixed_order else name
    return "zb"
