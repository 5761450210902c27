"""How good are the planner's plans? Bubble rates of `auto` on the published costs, over memory budgets.

    python -m recipes.benchmarks.planner --results cells.jsonl --out report.md --picture curve.png

prints for every row and budget the bubble rate of `auto`, the best public one within that budget, the one of our zb-v, the
lower bound of the chosen placement, the placement, the search time, and how many passes per second the performance model
runs. Each cell is kept in the results file as soon as it is known, and a later run goes on from there. `--best` spends the
efforts and seeds of `BEST` where the default misses what can be reached. Few microbatches want more chunks:
`--rows 21 22 23 24 --budgets 1.0 --chunks 6`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numba
import numpy as np

from lightning_zb.planning.auto import DEFAULT_EFFORT
from lightning_zb.planning.instance import build_instance, from_schedule, start_times
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planner import make_plan
from recipes.benchmarks.published import CHUNK_ROWS, FEW_ROWS, STAGE_ROWS

ROWS = STAGE_ROWS + CHUNK_ROWS + FEW_ROWS
BUDGETS = (0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0)
_MOST_CHUNKS = 4
BEST: dict[tuple[int, float], tuple[int, int, int]] = {
    (0, 1.0): (200, 0, 4),
    (1, 1.0): (400, 1, 4),
    (2, 1.0): (200, 2, 4),
    (3, 1.0): (120, 1, 4),
    (4, 1.0): (200, 0, 4),
    (5, 1.0): (120, 1, 4),
    (6, 1.0): (120, 1, 4),
    (7, 1.0): (200, 0, 4),
    (8, 1.0): (120, 1, 4),
    (9, 1.0): (120, 1, 4),
    (10, 1.0): (120, 1, 4),
    (11, 1.0): (120, 2, 4),
    (12, 1.0): (120, 1, 4),
    (13, 1.0): (120, 1, 4),
    (15, 1.0): (120, 1, 4),
    (16, 1.0): (120, 1, 4),
    (18, 1.0): (120, 1, 4),
    (19, 1.0): (120, 1, 4),
    (20, 1.0): (120, 1, 4),
    (0, 1.25): (200, 0, 4),
    (1, 1.25): (200, 0, 4),
    (2, 1.25): (400, 0, 4),
    (3, 1.25): (200, 1, 4),
    (4, 1.25): (200, 0, 4),
    (5, 1.25): (200, 0, 4),
    (6, 1.25): (200, 0, 4),
    (7, 1.25): (200, 0, 4),
    (9, 1.25): (200, 0, 4),
    (10, 1.25): (200, 0, 4),
    (11, 1.25): (200, 0, 4),
    (12, 1.25): (200, 0, 4),
    (13, 1.25): (200, 0, 4),
    (15, 1.25): (200, 0, 4),
    (16, 1.25): (200, 0, 4),
    (17, 1.25): (200, 0, 4),
    (18, 1.25): (200, 0, 4),
    (19, 1.25): (200, 0, 4),
    (20, 1.25): (200, 0, 4),
    (0, 1.5): (250, 0, 4),
    (12, 1.5): (4094, 0, 2),
    (13, 1.5): (250, 0, 4),
    (14, 1.5): (250, 1, 4),
}
"""Effort, seed and most chunks per device by row and budget, where more than the default effort pays."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What `auto` made of a row at a budget; one line of the results file.

    Args:
        row, budget, effort, seed, chunks: what was asked for; chunks is the most per device.
        bubble, bound: bubble rate of the plan, and of its lower bound.
        zb_v: bubble rate of our zb-v at the same limit.
        placement, status: of the plan.
        seconds: of the search.
        passes_per_second: simulated.
    """

    row: int
    budget: float
    effort: int
    seed: int
    chunks: int
    bubble: float
    bound: float
    zb_v: float
    placement: str
    status: str
    seconds: float
    passes_per_second: float

    @property
    def asked(self) -> tuple[int, float, int, int, int]:
        return self.row, self.budget, self.effort, self.seed, self.chunks


def passes_per_second(plan: Plan, repetitions: int = 20) -> float:
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


def solve(number: int, budget: float, effort: int, seed: int, chunks: int) -> Cell:
    """Plan one cell."""
    row = ROWS[number]
    costs = row.costs(chunks)
    began = time.perf_counter()
    plan = make_plan(costs, row.stages, row.microbatches, "auto", budget, effort=effort, seed=seed)
    seconds = time.perf_counter() - began
    zb_v = make_plan(costs, row.stages, row.microbatches, "zb-v", budget).predicted.bubble_rate
    return Cell(
        number,
        budget,
        effort,
        seed,
        chunks,
        bubble=plan.predicted.bubble_rate,
        bound=max(0.0, 1.0 - plan.ideal_seconds / plan.predicted.lower_bound),
        zb_v=zb_v,
        placement=plan.planner.reason.split()[1],
        status=plan.planner.status.value,
        seconds=seconds,
        passes_per_second=passes_per_second(plan),
    )


def read_cells(path: Path | None) -> dict[tuple[int, float, int, int, int], Cell]:
    """The cells of a results file, by what was asked for."""
    if path is None or not path.exists():
        return {}
    cells = [Cell(**json.loads(line)) for line in path.read_text().splitlines()]
    return {cell.asked: cell for cell in cells}


_HEAD = (
    "| model | P | m | budget | auto | public | zb-v | bound | placement | status | effort, seed | seconds | passes/s |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


_FASTEST = "Passes simulated per second:"


def table_line(cell: Cell) -> str:
    """One line of the report."""
    row = ROWS[cell.row]
    public = row.best_public(cell.budget)
    columns = (
        row.model,
        str(row.stages),
        str(row.microbatches),
        f"{cell.budget:g}",
        f"{cell.bubble:.4f}",
        "-" if public is None else f"{public[1]:.4f} {public[0]}",
        f"{cell.zb_v:.4f}",
        f"{cell.bound:.4f}",
        cell.placement,
        cell.status,
        f"{cell.effort}, {cell.seed}" + (f", {cell.chunks} chunks" if cell.chunks != _MOST_CHUNKS else ""),
        f"{cell.seconds:.1f}",
        f"{cell.passes_per_second:.2g}",
    )
    return "| " + " | ".join(columns) + " |"


def _panel(number: int) -> str:
    """The title under which a row is drawn: rows that differ in microbatches alone share it."""
    return f"{ROWS[number].model}, {ROWS[number].stages} devices" + (", times per chunk" if ROWS[number] in CHUNK_ROWS else "")


def draw(cells: list[Cell], path: Path) -> None:
    """The memory-bubble curves: a panel for each model and size, a line for each number of microbatches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = sorted({c.row for c in cells})
    titles = list(dict.fromkeys(_panel(n) for n in numbers))
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.6 * columns, 3.1 * lines), squeeze=False, sharey=True)
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    for axis, title in zip(axes.flat, titles, strict=False):
        for index, number in enumerate(n for n in numbers if _panel(n) == title):
            row, colour = ROWS[number], f"C{index}"
            measured = {c.budget: c.bubble for c in cells if c.row == number}
            curve = sorted({**dict.fromkeys(BUDGETS, np.nan), **measured}.items())  # the line breaks where none was measured
            axis.plot(*zip(*curve, strict=True), color=colour, marker="o", markersize=3, label=f"auto, m={row.microbatches}")
            public = [(least, rate) for _, least, rate in row.public if least <= curve[-1][0]]
            axis.plot(*zip(*public, strict=True), color=colour, marker="x", markersize=5, linestyle="none", alpha=0.6)
        axis.plot([], [], color="grey", marker="x", linestyle="none", label="published")
        axis.set(title=title, ylim=(0.0, 0.36), xlabel="memory budget")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("bubble rate")
    figure.suptitle("Bubble rate by memory budget (1.0: the whole model's activations for one microbatch)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(cells: list[Cell], command: str, before: str = "") -> str:
    """The Markdown report.

    Args:
        cells: in the order of the table.
        command: that made them.
        before: the report so far; what was written around its table stays.
    """
    table = [*_HEAD, *(table_line(cell) for cell in cells)]
    fastest = f"{_FASTEST} at most {max(c.passes_per_second for c in cells):.2g}."
    lines = before.split("\n")
    if _HEAD[0] in lines and any(line.startswith(_FASTEST) for line in lines):
        first = lines.index(_HEAD[0])
        last = next(i for i, line in enumerate(lines) if line.startswith(_FASTEST))
        return "\n".join([*lines[:first], *table, "", fastest, *lines[last + 1 :]])
    lines = [
        f"# Planner: bubble rates on the published costs, {date.today().isoformat()}",
        "",
        f"{platform.processor() or platform.machine()}, one process on one core, Python {platform.python_version()}, "
        f"numba {numba.__version__}, numpy {np.__version__}. `{command}`",
        "",
        *table,
        "",
        fastest,
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Print the table; write the report and the picture where asked."""
    parser = argparse.ArgumentParser(description="bubble rates of auto on the published costs")
    parser.add_argument("--effort", type=int, default=DEFAULT_EFFORT, help="work units of every search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--best", action="store_true", help="more effort and other seeds where they pay")
    parser.add_argument("--chunks", type=int, default=_MOST_CHUNKS, help="most chunks per device")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--rows", type=int, nargs="*", default=range(21), help="0 to 20, default; 21 to 24: few microbatches")
    parser.add_argument("--known", action="store_true", help="plan nothing, show what the results file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further cell after this time")
    parser.add_argument("--results", type=Path, help="file that keeps the cells, to go on from later")
    parser.add_argument("--out", type=Path, help="Markdown report; of one that exists only the table is written anew")
    parser.add_argument("--picture", type=Path, help="memory-bubble curves as PNG")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    known, cells = read_cells(arguments.results), []
    print("\n".join(_HEAD), flush=True)
    for number in arguments.rows:
        for budget in arguments.budgets:
            effort_seed_chunks = arguments.effort, arguments.seed, arguments.chunks
            if arguments.best:
                effort_seed_chunks = BEST.get((number, budget), effort_seed_chunks)
            asked = (number, budget, *effort_seed_chunks)
            if asked not in known:
                if arguments.known or time.perf_counter() - began > arguments.seconds:
                    continue
                known[asked] = solve(*asked)
                if arguments.results is not None:
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(asdict(known[asked])) + "\n")
            cells.append(known[asked])
            print(table_line(cells[-1]), flush=True)
    if cells and arguments.out:
        before = arguments.out.read_text() if arguments.out.exists() else ""
        arguments.out.write_text(report(cells, "python -m recipes.benchmarks.planner" + " --best" * arguments.best, before))
    if cells and arguments.picture:
        draw(cells, arguments.picture)


if __name__ == "__main__":
    main()
