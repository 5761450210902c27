"""How good are the planner's plans? Bubble rates of `auto` on the published costs, over memory budgets.

    python -m recipes.benchmarks.planner --effort 200 --budgets 1.0 --out report.md --picture curve.png

prints for every row and budget the bubble rate of `auto`, the one of zb-v at the same limit, the best one of the public
heuristics where it is known, the lower bound of the chosen placement, the placement and the search time, then how many
passes per second the performance model runs. Every stage of a row is split evenly into layers, as many as the most chunks
per device that are tried (`--chunks`).
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numba
import numpy as np

from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.instance import build_instance, from_schedule, start_times
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planner import make_plan


@dataclass(frozen=True, slots=True)
class Row:
    """One profiled model: milliseconds of a whole stage, bytes per token and layer."""

    model: str
    stages: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    communication: float
    activation: int
    weight_stash: int

    def costs(self, layers_per_stage: int) -> CostModel:
        """The cost model with each stage split evenly into layers."""
        layer = LayerCost(
            name="layer",
            forward=self.forward / layers_per_stage / 1e3,
            backward_input=self.backward_input / layers_per_stage / 1e3,
            backward_weight=self.backward_weight / layers_per_stage / 1e3,
            activation_bytes=self.activation / layers_per_stage,
            weight_stash_bytes=self.weight_stash / layers_per_stage,
        )
        return CostModel((layer,) * (self.stages * layers_per_stage), Link(latency=self.communication / 1e3))


# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), Table 6: profiled times; memory from its Table 1.
STAGE_ROWS = (
    Row("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 201216, 73728),
    Row("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 201216, 73728),
    Row("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 201216, 73728),
    Row("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 303104, 131072),
    Row("6.2B", 8, 32, 29.802, 29.428, 19.53, 0.577, 303104, 131072),
    Row("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 303104, 131072),
    Row("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 378880, 163840),
    Row("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 378880, 163840),
    Row("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 378880, 163840),
    Row("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 454656, 196608),
    Row("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 454656, 196608),
    Row("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.46, 454656, 196608),
)
# The authors' script for ZB-V (arXiv 2401.10241, branch arxiv, efficiency.py): times per chunk, here doubled to a stage.
CHUNK_ROWS = (
    Row("6.2B", 16, 48, 28.814, 28.76, 19.352, 1.61, 303104, 131072),
    Row("6.2B", 16, 64, 28.824, 28.786, 19.376, 1.621, 303104, 131072),
    Row("6.2B", 16, 128, 28.632, 28.612, 19.278, 1.619, 303104, 131072),
    Row("14.6B", 24, 72, 13.526, 13.938, 10.502, 0.755, 378880, 163840),
    Row("14.6B", 24, 96, 13.566, 13.968, 10.518, 0.758, 378880, 163840),
    Row("14.6B", 24, 192, 13.57, 13.98, 10.52, 0.77, 378880, 163840),
    Row("28.3B", 32, 96, 18.916, 19.496, 14.576, 0.879, 454656, 196608),
    Row("28.3B", 32, 128, 18.938, 19.488, 14.612, 0.892, 454656, 196608),
    Row("28.3B", 32, 256, 18.894, 19.288, 14.386, 0.887, 454656, 196608),
)


def plan_row(row: Row, budget: float, schedule: str, chunks: int, **options: Any) -> tuple[Plan, float]:
    """The plan of a row at a budget, and the seconds it took."""
    started = time.perf_counter()
    plan = make_plan(row.costs(chunks), row.stages, row.microbatches, schedule, budget, **options)
    return plan, time.perf_counter() - started


def passes_per_second(plan: Plan, repetitions: int = 50) -> float:
    """How many passes of a plan's order the search simulates in a second."""
    chunk_costs = plan.costs.chunks(plan.partition)
    instance = build_instance(plan.placement, chunk_costs, plan.costs, plan.num_microbatches)
    order = from_schedule(instance, plan.schedule)
    start, ends = np.empty(instance.num_passes), np.empty(instance.num_devices)
    start_times(instance, order, start, ends)
    began = time.perf_counter()
    for _ in range(repetitions):
        start_times(instance, order, start, ends)
    return repetitions * instance.num_passes / (time.perf_counter() - began)


def table_line(row: Row, budget: float, arguments: argparse.Namespace) -> tuple[str, Plan]:
    """One line of the report, and the plan behind it."""
    options = {"effort": arguments.effort, "seed": arguments.seed}
    plan, seconds = plan_row(row, budget, "auto", arguments.chunks, **options)
    reference = plan_row(row, budget, "zb-v", arguments.chunks)[0].predicted.bubble_rate
    predicted = plan.predicted
    ideal = predicted.step_time * (1.0 - predicted.bubble_rate)
    bound = max(0.0, 1.0 - ideal / predicted.lower_bound)
    name = plan.planner.reason.split()[1]
    cells = (
        row.model,
        str(row.stages),
        str(row.microbatches),
        f"{budget:g}",
        f"{max(0.0, predicted.bubble_rate):.4f}",  # rounding of sums may leave -1e-16
        f"{reference:.4f}",
        f"{bound:.4f}",
        name,
        plan.planner.status.value,
        f"{seconds:.1f}",
    )
    return "| " + " | ".join(cells) + " |", plan


def draw(points: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """The memory-bubble curve of every row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, values in points.items():
        axes.plot(*zip(*sorted(values), strict=True), marker="o", markersize=3, label=label)
    axes.set_xlabel("memory budget (1.0 = activations of the whole model for one microbatch)")
    axes.set_ylabel("bubble rate")
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Print the table; write the report and the picture where asked."""
    parser = argparse.ArgumentParser(description="bubble rates of auto on the published costs")
    parser.add_argument("--effort", type=int, default=28, help="work units of every search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=4, help="most chunks per device")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0])
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows, 0 to 20; default all")
    parser.add_argument("--out", type=Path, help="Markdown report")
    parser.add_argument("--picture", type=Path, help="memory-bubble curve as PNG")
    arguments = parser.parse_args(argv)
    rows = STAGE_ROWS + CHUNK_ROWS
    lines = [
        f"# Planner: bubble rates at effort {arguments.effort}, seed {arguments.seed}, {date.today().isoformat()}",
        "",
        f"{platform.processor() or platform.machine()}, one core, Python {platform.python_version()}, "
        f"numba {numba.__version__}, numpy {np.__version__}.",
        "",
        "| model | P | m | budget | auto | zb-v | bound | placement | status | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    points: dict[str, list[tuple[float, float]]] = {}
    speed = 0.0
    for number in range(len(rows)) if arguments.rows is None else arguments.rows:
        row = rows[number]
        for budget in arguments.budgets:
            line, plan = table_line(row, budget, arguments)
            print(line, flush=True)
            lines.append(line)
            label = f"{row.model} P={row.stages} m={row.microbatches}"
            points.setdefault(label, []).append((budget, plan.predicted.bubble_rate))
            speed = max(speed, passes_per_second(plan))
    lines += ["", f"Passes simulated per second: {speed:.3g}."]
    print(lines[-1])
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    if arguments.picture:
        draw(points, arguments.picture)


if __name__ == "__main__":
    main()
