"""What co-optimising partition, placement and schedule gains: measurements for the report of the second paper's evaluation.

    python -m recipes.benchmarks.cooptimizer grid --results results.jsonl --seconds 540
    python -m recipes.benchmarks.cooptimizer_report results.jsonl --out report.md --pictures pictures

Each part appends one line of JSON for each of its rows and leaves out rows that the file has, so a part can be stopped and
started again. All step times are predictions of the performance model with every link charged; plans hold what a device of
80 GB can, model states included. Seconds are processor seconds of one process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from lightning_zb.cli.baselines import BASELINES
from lightning_zb.planning.budget import InfeasibleBudget, constant_bytes
from lightning_zb.planning.cooptimize.optimize import cooptimize
from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.exact import solve
from lightning_zb.planning.partitioning import PartitionSpec
from lightning_zb.planning.plan import Plan, PlanStatus
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.registry import find_schedule, known_schedules
from recipes.benchmarks.floors import floor
from recipes.benchmarks.joint_optimum import joint_optimum
from recipes.costs.device import H800
from recipes.costs.models import CONFIGURATIONS, Configuration
from recipes.costs.random_cases import RandomCase, Trait, random_case

CAPACITY = f"{H800.capacity / 1e9:g}GB"
DEVICES, MICROBATCHES = (4, 8, 16), (16, 64, 256)
DEVICES_OF_SIZE = {"small": 4, "medium": 8, "large": 16}
"""The pipeline that belongs to a size where one is enough: layers a device stay the same."""

EXACT_SECONDS = 30.0
PHASES = ("partition", "placement", "schedule")

Row = dict[str, Any]
Task = tuple[str, Callable[[], Row]]


def step_time(plan: Plan) -> float:
    """Seconds of a step: the papers' cost."""
    return plan.predicted.step_time


def peak_bytes(plan: Plan) -> float:
    """What the fullest device holds, model states included."""
    states = constant_bytes(plan.costs, plan.partition, plan.placement)
    return max(a + b for a, b in zip(plan.predicted.peak_bytes, states, strict=True))


def baseline_plans(config: Configuration, costs: CostModel, num_devices: int, num_microbatches: int) -> dict[str, Plan | None]:
    """The second paper's baselines, with whole layers in even numbers, or balanced for Mist; None where one does not exist.

    Mist comes twice: cut between all items, which may leave the head alone on a device, and between whole layers, the ends
    riding along, as the paper describes it ("the number of layers per stage").

    A schedule may not fit the memory, and two chunks a device need twice as many layers as devices.
    """
    plans: dict[str, Plan | None] = {}
    for name in (*BASELINES, "zb", "mist-layers"):
        baseline = BASELINES.get(name.removesuffix("-layers"))
        schedule = name if baseline is None else baseline.schedule
        counts: PartitionSpec | None = "balanced"
        if name == "mist-layers":
            counts = config.balanced_counts(costs, num_devices)
        elif baseline is None or baseline.partition == "even":
            spec = find_schedule(schedule)
            counts = config.even_counts(spec.placement(num_devices, config.num_layers).num_chunks)  # type: ignore[union-attr]
        plans[name] = None
        if counts is not None:
            with suppress(InfeasibleBudget):
                plans[name] = make_plan(costs, num_devices, num_microbatches, schedule, CAPACITY, counts)
    return plans


def measured(*problem: Any, **options: Any) -> tuple[Plan, Row]:
    """The plan of `cooptimize`, and as a row its figures and the processor seconds it took."""
    began = time.process_time()
    plan = cooptimize(*problem, **options)
    seconds = time.process_time() - began
    row = {
        "ours": step_time(plan),
        "seconds": seconds,
        "bound": plan.predicted.lower_bound,
        "peak": peak_bytes(plan),
        "chunks": [len(plan.placement.chunks_of(d)) for d in range(plan.num_devices)],
        "layers": [len(chunk) for chunk in plan.partition.chunks],
        "placement": list(plan.placement.devices),
        "status": plan.planner.status.value,
    }
    return plan, row


def compared(config: Configuration, tokens: int, num_devices: int, num_microbatches: int, options: Row) -> Row:
    """Ours beside all baselines."""
    costs = config.costs(tokens)
    plans = baseline_plans(config, costs, num_devices, num_microbatches)
    return {
        "config": config.name,
        "tokens": tokens,
        "P": num_devices,
        "m": num_microbatches,
        "floor": floor(costs, num_devices, num_microbatches, H800.capacity),
        "baselines": {name: plan and step_time(plan) for name, plan in plans.items()},
        "baseline_peaks": {name: plan and peak_bytes(plan) for name, plan in plans.items()},
        **measured(costs, num_devices, num_microbatches, CAPACITY, **options)[1],
    }


def grid(options: Row) -> Iterator[Task]:
    """Nine configurations on 4, 8 and 16 devices, with 16, 64 and 256 microbatches of 4K and of 2K tokens."""
    for tokens in (4096, 2048):
        for config in CONFIGURATIONS.values():
            for p in DEVICES:
                for m in MICROBATCHES:
                    yield f"{config.name} {tokens} P={p} m={m}", partial(compared, config, tokens, p, m, options)


def sequence(options: Row) -> Iterator[Task]:
    """Nemotron-H (large) on eight devices with 64 microbatches of 1K to 32K tokens."""
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768):
        config = CONFIGURATIONS["nemotron-h-large"]
        yield f"{config.name} {tokens} P=8 m=64", partial(compared, config, tokens, 8, 64, options)


def ablation(options: Row) -> Iterator[Task]:
    """Each phase alone, in pairs and all together, on the pipeline of each size with 64 microbatches of 4K tokens."""
    for config in CONFIGURATIONS.values():
        p = DEVICES_OF_SIZE[config.name.rpartition("-")[2]]
        for count in range(len(PHASES) + 1):
            for phases in combinations(PHASES, count):
                yield f"{config.name} {'+'.join(phases) or 'none'}", partial(_ablated, config, p, phases, options)


def _ablated(config: Configuration, num_devices: int, phases: tuple[str, ...], options: Row) -> Row:
    costs = config.costs(4096)
    _, row = measured(costs, num_devices, 64, CAPACITY, phases=phases, **options)
    return {"config": config.name, "P": num_devices, "m": 64, "phases": list(phases), **row}


def random_cases(options: Row) -> Iterator[Task]:
    """Heterogeneous cases: each trait alone, and drawn mixtures, against every schedule by name with each of our partitions."""
    for trait in Trait:
        for seed in range(3):
            yield f"{trait.value} {seed}", partial(_against_names, random_case(seed, trait), options)
    for seed in range(100, 120):
        p, layers, m = ((2, 12, 6), (4, 24, 16), (4, 30, 8), (8, 48, 32), (8, 40, 12))[seed % 5]
        shape: Row = {"num_devices": p, "num_layers": layers, "num_microbatches": m, "memory": (0.8, 1.0, 1.5, 2.0)[seed % 4]}
        yield f"mixture {seed}", partial(_against_names, random_case(seed, **shape), options)


def _against_names(case: RandomCase, options: Row) -> Row:
    """Ours, and the best of the schedules by name over partitions: even, balanced, and the one that ours has if it has as
    many chunks."""
    costs, p, m = case.costs, case.num_devices, case.num_microbatches
    plan, row = measured(costs, p, m, case.memory, **options)
    partitions: list[PartitionSpec] = ["even", "balanced", [len(chunk) for chunk in plan.partition.chunks]]
    names = [name.replace("-N", f"-{v}") for name in known_schedules() for v in ((2, 4) if name.endswith("-N") else (0,))]
    found: dict[str, float] = {}
    for name in names:
        if name == "auto" or find_schedule(name).own_budget is not None:
            continue
        for partition in partitions:
            try:
                named = make_plan(costs, p, m, name, case.memory, partition)
            except ValueError:  # it does not fit the memory, or the partition not the placement
                continue
            found[f"{name} {partition}"] = step_time(named)
    best = min(found, key=lambda name: found[name]) if found else None
    return {"case": case.name, "P": p, "m": m, "floor": plan.ideal_seconds, "best": best, "named": best and found[best], **row}


def optimality(options: Row) -> Iterator[Task]:
    """Small cases of each trait: the order beside the exact solver's for the same layout, and all beside all layouts."""
    for trait in Trait:
        for seed in range(2):
            yield f"order {trait.value} {seed}", partial(_beside_the_solver, trait, seed, options)
            yield f"joint {trait.value} {seed}", partial(_beside_all_layouts, trait, seed, options)


def _beside_the_solver(trait: Trait, seed: int, options: Row) -> Row:
    case = random_case(seed, trait, num_devices=3, num_layers=6, num_microbatches=3)
    plan, row = measured(case.costs, 3, 3, case.memory, **options)
    chunks = case.costs.chunks(plan.partition)
    limits = plan.memory_limit
    found = solve(plan.placement, chunks, case.costs, 3, limits, EXACT_SECONDS, warm_start=plan.schedule)
    proved = found.status is PlanStatus.OPTIMAL
    return {"P": 3, "m": 3, "items": len(case.costs.layers), "exact": found.value, "proved": proved, **row}


def _beside_all_layouts(trait: Trait, seed: int, options: Row) -> Row:
    case = random_case(seed, trait, num_devices=2, num_layers=4, num_microbatches=2)
    plan, row = measured(case.costs, 2, 2, case.memory, **options)
    best = joint_optimum(case, 4, step_time(plan))
    return {"P": 2, "m": 2, "items": len(case.costs.layers), "exact": best, "proved": False, **row}


def scaling(options: Row) -> Iterator[Task]:
    """Nemotron-H (large), 4K tokens, 8 to 128 devices in pipelines of eight: strong with 256 microbatches in all, weak with 32
    a pipeline. Gradients are reduced in a ring after the step."""
    config = CONFIGURATIONS["nemotron-h-large"]
    for replicas in (1, 2, 4, 8, 16):
        for kind, m in (("strong", 256 // replicas), ("weak", 32)):
            yield f"{kind} {8 * replicas}", partial(_scaled, config, kind, replicas, m, options)


def _scaled(config: Configuration, kind: str, replicas: int, num_microbatches: int, options: Row) -> Row:
    row = compared(config, 4096, 8, num_microbatches, options)
    parameters = config.costs(4096).layers
    heaviest = 2 * max(sum(layer.parameter_bytes for layer in parameters) / 8, max(x.parameter_bytes for x in parameters))
    ring = 2 * (replicas - 1) / replicas
    reduction = ring * heaviest / H800.link.bandwidth
    return {**row, "kind": kind, "replicas": replicas, "reduction": reduction}


def generation(options: Row) -> Iterator[Task]:
    """Seconds to a plan beside those of the exact solver, which orders the passes of ours only, half a minute at most."""
    for p, m in ((2, 2), (2, 4), (2, 8), (4, 8), (8, 16)):
        yield f"P={p} m={m}", partial(_solved, p, m, options)


def _solved(num_devices: int, num_microbatches: int, options: Row) -> Row:
    costs = CONFIGURATIONS["gemma-small"].costs(4096)
    plan, row = measured(costs, num_devices, num_microbatches, CAPACITY, **options)
    began = time.perf_counter()
    found = solve(
        plan.placement,
        costs.chunks(plan.partition),
        costs,
        num_microbatches,
        plan.memory_limit,
        EXACT_SECONDS,
        warm_start=plan.schedule,
    )
    exact = {"exact": found.value, "exact_bound": found.bound, "exact_seconds": time.perf_counter() - began}
    proved = found.status is PlanStatus.OPTIMAL
    return {"P": num_devices, "m": num_microbatches, "passes": 3 * num_microbatches * plan.placement.num_chunks,
            "proved": proved, **exact, **row}  # fmt: skip


PARTS = {
    "grid": grid,
    "sequence": sequence,
    "ablation": ablation,
    "random": random_cases,
    "scaling": scaling,
    "generation": generation,
    "optimality": optimality,
}


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing of a part, until the seconds are over."""
    parser = argparse.ArgumentParser(description="measure what co-optimisation gains")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--results", type=Path, default=Path("cooptimizer.jsonl"), help="rows are appended here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row later than this")
    parser.add_argument("--effort", type=int, help="work units; default: the planner's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has all of these in it")
    arguments = parser.parse_args(argv)
    options: Row = {"seed": arguments.seed}
    if arguments.effort is not None:
        options["effort"] = arguments.effort
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = {(row["part"], row["name"]) for row in map(json.loads, lines)}
    began = time.perf_counter()
    for name, make in PARTS[arguments.part](options):
        if (arguments.part, name) in done or not all(part in name for part in arguments.only):
            continue
        if time.perf_counter() - began > arguments.seconds:
            print("more rows are left; start again")
            return
        row = {"part": arguments.part, "name": name, **make(), **options}
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['ours']:.5g} s in {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
