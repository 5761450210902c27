"""The commands that make or read one plan. Each takes its parsed options and says whether the plan is feasible."""

from __future__ import annotations

import argparse
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_zb.cli.figures import devices, figures, headline, worlds_table
from lightning_zb.cli.problem import (
    check_devices,
    check_out,
    constraints_of,
    costs_for,
    search_options,
    tell_of_compiling,
    with_bound,
)
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.budget import fits
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.layout_string import write_layout
from lightning_zb.planning.plan import Plan, PlanStatus
from lightning_zb.planning.planfile import read_costs, read_plan, write_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.timeline import predict_with
from lightning_zb.planning.torch_csv import to_csv
from lightning_zb.planning.worlds import worlds
from lightning_zb.report import chrome_trace, svg, terminal_grid, timeline_picture

_SUFFIXES = {"chrome": ".trace.json", "csv": ".csv", "layout": ".layout.txt", "svg": ".svg"}
_SAME = 1e-6  # relative; plan files written by hand may be rounded


def plan(arguments: argparse.Namespace) -> bool:
    """Plan, print what came out, and write the plan file."""
    check_out("--out", arguments.out)
    if (arguments.devices is None) == (arguments.world_size is None):
        raise ValueError("--devices: write either --devices P, or --world-size N to have the number of pipelines chosen too")

    def make(costs: CostModel, num_devices: int, num_microbatches: int) -> Plan:
        tell_of_compiling()
        return make_plan(
            costs,
            num_devices,
            num_microbatches,
            schedule=arguments.schedule,
            memory_budget=arguments.memory_budget,
            partition=arguments.partition,
            **search_options(arguments.schedule, arguments),
            **constraints_of(arguments),
        )

    if arguments.world_size is None:
        result = make(costs_for(arguments.costs, arguments.devices), arguments.devices, arguments.microbatches)
    else:
        found = worlds(read_costs(arguments.costs), arguments.world_size, arguments.microbatches, make)
        print(worlds_table(found))
        print()
        assert found[0].plan is not None  # else `worlds` raises
        result = found[0].plan
    objective = Objective(arguments.objective)
    result = with_bound(result, objective)
    print(headline(result))
    print(figures(result, objective))
    print()
    print(devices(result))
    if arguments.out is not None:
        write_plan(result, arguments.out)
        print(f"\nwritten to {arguments.out}")
    return True


def simulate(arguments: argparse.Namespace) -> bool:
    """Run a plan through the performance model, with other costs if given; says so where the file promised something else."""
    written = _read(arguments.plan)
    costs, planner, source = written.costs, written.planner, "its passes and costs give"
    if arguments.costs is not None:
        costs, source = costs_for(arguments.costs, written.num_devices), f"{arguments.costs} gives"
        needed, given = len(written.costs.layers), len(costs.layers)
        if given != needed:
            raise ValueError(
                f"--costs {arguments.costs}: has {given} layers and the plan divides {needed}; give costs of its own model"
            )
        planner = replace(planner, reason="", status=PlanStatus.FEASIBLE)  # what was said of it held for its own costs
    result = with_bound(replace(written, costs=costs, planner=planner, predicted=predict_with(written, costs)))
    print(headline(result))
    print(figures(result))
    print()
    print(devices(result))
    for name in ("step_time", "period", "makespan"):
        promised, found = getattr(written.predicted, name), getattr(result.predicted, name)
        if abs(promised - found) > _SAME * abs(found):
            print(f"note: the file's predicted.{name} is {promised:.6g} s, {source} {found:.6g} s")
    limits = result.memory_limit
    if limits is None or fits(result.predicted.peak_bytes, limits):
        return True
    over = [d for d in range(result.num_devices) if not fits([result.predicted.peak_bytes[d]], [limits[d]])]
    peaks = [f"{peak:.0f}" for peak in result.predicted.peak_bytes]
    print(f"infeasible: devices {over} exceed memory_limit; the passes need {', '.join(peaks)} activation bytes")
    return False


def show(arguments: argparse.Namespace) -> bool:
    """Draw a plan in the terminal, and as a picture if asked to."""
    check_out("--png", arguments.png, ".png")
    result = _read(arguments.plan)
    print(headline(result))
    grid = terminal_grid(result, width=shutil.get_terminal_size((120, 24)).columns)
    print(grid)
    with suppress(ValueError):  # not every plan has one
        print(f"layout {write_layout(result.partition, result.placement, result.costs)}")
    has_numbers = any(c.isdigit() for line in grid.splitlines() for c in line.removeprefix("device").lstrip(" 0123456789"))
    number = "the number is the microbatch" if has_numbers else "a wider terminal has room for microbatch numbers"
    print(f"F forward, B input gradient, W weight gradient, BW both; {number}; - goes on; . is idle")
    if arguments.png is not None:
        timeline_picture(result, arguments.png)
        print(f"written to {arguments.png}")
    return True


def export(arguments: argparse.Namespace) -> bool:
    """Write a plan for another tool."""
    result = _read(arguments.plan)
    path = arguments.out
    if path is None:
        path = arguments.plan.with_name(arguments.plan.stem + _SUFFIXES[arguments.format])
    check_out("--out", path, ".svg" if arguments.format == "svg" else None)
    if arguments.format == "chrome":
        chrome_trace(result, path)
    elif arguments.format == "csv":
        path.write_text(to_csv(result.schedule))
    elif arguments.format == "layout":
        path.write_text(write_layout(result.partition, result.placement, result.costs) + "\n")
    else:
        svg(result, path)
    print(f"written to {path}")
    return True


def _read(path: Path) -> Plan:
    result = read_plan(path)
    check_devices(result.costs, result.num_devices, f"{path}: costs")
    return result
