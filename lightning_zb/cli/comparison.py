"""The command `compare`: schedules, and microbatch sizes, ranked at equal global batch and memory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from lightning_zb.cli.ablation import ablation_table
from lightning_zb.cli.baselines import BASELINES
from lightning_zb.cli.figures import gap
from lightning_zb.cli.problem import constraints_of, costs_for, search_options, strongest_bound, tell_of_compiling, value_of
from lightning_zb.cli.text import as_option, byte_unit, runs, share, table, time_unit
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.budget import InfeasibleBudget, MemoryBudget, activation_limits, fits, infeasible
from lightning_zb.planning.cooptimize.cut_rules import read_constraints
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import ScheduleSpec, find_schedule


@dataclass(frozen=True, slots=True)
class Case:
    """One costs file of a comparison.

    Args:
        name: the file and its microbatches.
        costs: what it holds.
        num_microbatches: of a step.
        budget: the memory budget, as `make_plan` takes it for these costs.
        unit: what 1.0 of that budget is in the numbers the user writes, which count in activations of the first file.
    """

    name: str
    costs: CostModel
    num_microbatches: int
    budget: MemoryBudget
    unit: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule that fits.

    Args:
        name: of the schedule, as asked for.
        case: its costs.
        plan: what came out.
        bound: seconds; no order of its partition and placement within its memory is faster.
    """

    name: str
    case: Case
    plan: Plan
    bound: float


def compare(arguments: argparse.Namespace) -> bool:
    """Plan every schedule for every costs file and print the table; says whether any fits."""
    objective = Objective(arguments.objective)
    cases = _cases(arguments)
    tell_of_compiling()
    entries: list[Entry] = []
    failures: list[str] = []
    for case in cases:
        for name in arguments.schedules:
            label = f"{name} ({case.name})" if len(cases) > 1 else name
            try:
                plan = _plan(name, case, arguments)
            except InfeasibleBudget as error:
                failures.append(
                    f"{label}: infeasible; the smallest --memory-budget that fits is {_smallest(error.smallest, case.unit)}"
                )
                continue
            except ValueError as error:
                raise ValueError(f"{label}: {error}") from None
            entries.append(Entry(name, case, plan, strongest_bound(plan, objective).seconds))
    if entries:
        print(comparison_table(entries, objective, several_cases=len(cases) > 1))
    if arguments.memory_budget is None:
        print("no --memory-budget: every schedule uses what it likes, see the peaks")
    for failure in failures:
        print(failure)
    if arguments.ablation:
        constraints = constraints_of(arguments).get("constraints")
        for case in cases:
            options = {**search_options("auto", arguments), "rules": read_constraints(constraints, case.costs)}
            print(f"\nco-optimisation of {case.name}, phase by phase:")
            print(ablation_table(case.costs, arguments.devices, case.num_microbatches, case.budget, options))
    return bool(entries)


def comparison_table(entries: list[Entry], objective: Objective, several_cases: bool) -> str:
    """The table, the fastest first.

    Args:
        entries: at least one.
        objective: what they are ranked by; bound and gap are of this figure.
        several_cases: whether to name the costs file of each row.
    """
    entries = sorted(entries, key=lambda e: value_of(e.plan, objective))
    slowest = value_of(entries[-1].plan, objective)
    second, time_name = time_unit(e.plan.predicted.makespan for e in entries)
    byte, byte_name = byte_unit(peak for e in entries for peak in e.plan.predicted.peak_bytes)
    header = ["schedule", f"step_time ({time_name})", "period", "makespan", "bubble", "idle",
              f"bound of {objective.value}", "gap", "speed-up", "search (s)", f"peak by device ({byte_name})"]  # fmt: skip
    rows = []
    for e in entries:
        p = e.plan.predicted
        value = value_of(e.plan, objective)
        rows.append(
            [
                e.name,
                *(f"{t / second:.2f}" for t in (p.step_time, p.period, p.makespan)),
                share(p.bubble_rate),
                share(p.idle_fraction),
                f"{e.bound / second:.2f}",
                gap(value, e.bound),
                f"{slowest / value:.3f}" if value > 0 else "-",
                f"{e.plan.planner.seconds:.2f}",
                runs([f"{peak / byte:.2f}" for peak in p.peak_bytes]),
            ]
        )
    left = [0, len(header) - 1]
    if several_cases:
        header.insert(1, "costs")
        for row, e in zip(rows, entries, strict=True):
            row.insert(1, e.case.name)
        left = [0, 1, len(header) - 1]
    return table(header, rows, left)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    first: CostModel | None = None
    cases = []
    for item in arguments.costs:
        num_microbatches = item.num_microbatches or arguments.microbatches
        if num_microbatches is None:
            raise ValueError(
                f"--costs {item.path}: has no microbatches; write {item.path}:M, or --microbatches M for all files"
            )
        costs = costs_for(item.path, arguments.devices)
        first = costs if first is None else first
        unit = _unit(arguments.memory_budget, first, costs)
        budget = _scaled(arguments.memory_budget, 1.0 / unit)
        cases.append(Case(f"{item.path.stem}:{num_microbatches}", costs, num_microbatches, budget, unit))
    return cases


def _unit(budget: MemoryBudget, first: CostModel, costs: CostModel) -> float:
    """Activations of these costs over those of the first."""
    entries = budget if isinstance(budget, (list, tuple)) else [budget]
    if costs is first or not any(isinstance(entry, float) for entry in entries):
        return 1.0
    if first.activation_bytes == 0 or costs.activation_bytes == 0:
        raise ValueError("--memory-budget: a number needs activation_bytes in every costs file; write a size such as 40GiB")
    return costs.activation_bytes / first.activation_bytes


def _scaled(budget: MemoryBudget, factor: float) -> MemoryBudget:
    """A budget with its numbers multiplied; sizes stay as they are."""
    if budget is None or isinstance(budget, str):
        return budget
    if isinstance(budget, (int, float)):
        return budget * factor
    return [entry if isinstance(entry, str) else entry * factor for entry in budget]


def _smallest(budget: MemoryBudget, unit: float) -> str:
    """The smallest budget of a case as the user would write it."""
    return as_option(_scaled(budget, unit))


def _plan(name: str, case: Case, arguments: argparse.Namespace) -> Plan:
    """Plan one row.

    Raises:
        InfeasibleBudget: it does not fit.
        ValueError: it cannot be planned at all; says why.
    """
    schedule, partition = name, arguments.partition
    if name in BASELINES:
        schedule, partition = BASELINES[name].schedule, BASELINES[name].partition
    spec = find_schedule(schedule)
    own_budget = spec.own_budget is not None
    constraints = {} if isinstance(spec, ScheduleSpec) else constraints_of(arguments)
    plan = make_plan(
        case.costs,
        arguments.devices,
        case.num_microbatches,
        schedule=schedule,
        memory_budget=None if own_budget else case.budget,
        partition=partition,
        **search_options(schedule, arguments),
        **constraints,
    )
    if own_budget and case.budget is not None:
        limits = activation_limits(case.budget, case.costs, plan.partition, plan.placement)
        if not fits(plan.predicted.peak_bytes, limits):
            raise infeasible(
                case.budget, plan.predicted.peak_bytes, f"schedule {schedule!r}", case.costs, plan.partition, plan.placement
            )
    return plan
