"""From the options of a command to a plan."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_zb.planning.bounds import Bound, Objective, bounds_of_orders, meets
from lightning_zb.planning.compiling import is_compiled
from lightning_zb.planning.costs import CostModel, Link
from lightning_zb.planning.plan import Plan, PlanStatus
from lightning_zb.planning.planfile import read_costs
from lightning_zb.planning.registry import SearchSpec, find_schedule


def costs_for(path: Path, num_devices: int) -> CostModel:
    """Read a costs file and see that its links and speeds are those of so many devices.

    Raises:
        ValueError: they are not, or the file is wrong; the message names file and field.
    """
    costs = read_costs(path)
    check_devices(costs, num_devices, str(path))
    return costs


def check_devices(costs: CostModel, num_devices: int, where: str) -> None:
    """See that links and speeds are those of so many devices.

    Raises:
        ValueError: they are not; the message starts with `where`.
    """
    if costs.device_speed is not None and len(costs.device_speed) != num_devices:
        raise ValueError(f"{where}: device_speed: has {len(costs.device_speed)} entries for {num_devices} devices")
    if not isinstance(costs.link, Link) and [len(row) for row in costs.link] != [num_devices] * num_devices:
        rows = [len(row) for row in costs.link]
        raise ValueError(f"{where}: link: has rows of {rows} links; {num_devices} devices need {num_devices} of {num_devices}")


def check_out(option: str, path: Path | None, suffix: str | None = None) -> None:
    """See before any work is done that a file can be written.

    Args:
        option: that named it.
        path: where to; None where nothing is to be written.
        suffix: what its name must end with, where it must.

    Raises:
        ValueError: it cannot; the message starts with the option.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; write the name of a file in it")
    if suffix is not None and path.suffix != suffix:
        raise ValueError(f"{option} {path}: a picture in {suffix[1:]} needs a name that ends with {suffix}")


def tell_of_compiling() -> None:
    """Say at a terminal why the first plan of an installation takes longer."""
    if sys.stderr.isatty() and not is_compiled():
        print("compiling the planner's loops first, once an installation: a minute or two", file=sys.stderr)


def search_options(schedule: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a search that were given; none for a schedule that does not search."""
    if not isinstance(find_schedule(schedule), SearchSpec):
        return {}
    given = {name: getattr(arguments, name) for name in ("objective", "effort", "seconds", "seed")}
    return {name: value for name, value in given.items() if value is not None}


def constraints_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The option of `auto` that says what its cuts keep to; empty where nothing was demanded."""
    given = {name: getattr(arguments, name) for name in ("together", "first", "alone") if getattr(arguments, name)}
    return {"constraints": given} if given else {}


def strongest_bound(plan: Plan, objective: Objective) -> Bound:
    """No order of the plan's partition and placement within its memory limit is faster."""
    chunk_costs = plan.costs.chunks(plan.partition)
    limits = plan.memory_limit
    return bounds_of_orders(plan.placement, chunk_costs, plan.costs, plan.num_microbatches, limits, objective)[0]


def with_bound(plan: Plan, objective: Objective = Objective.STEP_TIME) -> Plan:
    """The plan with the strongest bound of its step_time, and optimal where its objective meets the bound of that."""
    predicted = plan.predicted
    bound = max(predicted.lower_bound, strongest_bound(plan, Objective.STEP_TIME).seconds)
    if meets(predicted.step_time, bound):
        bound = predicted.step_time
    planner = plan.planner
    if meets(value_of(plan, objective), strongest_bound(plan, objective).seconds):
        planner = replace(planner, status=PlanStatus.OPTIMAL)
    return replace(plan, predicted=replace(predicted, lower_bound=float(bound)), planner=planner)


def value_of(plan: Plan, objective: Objective) -> float:
    """The predicted seconds of that name."""
    return getattr(plan.predicted, objective.value)
