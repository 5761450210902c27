"""Whether plans are true: step time and peak bytes, predicted and measured, on layers that take known times and bytes.

    torchrun --standalone --nproc-per-node 4 -m recipes.benchmarks.fidelity --results results.jsonl

Layers sleep, so a process for each device fits on two cores. Every plan is made from the known costs alone and trained for some
steps: first one after another, then each begun by all devices at once and measured by the profiler. The former take the
period that was predicted, the latter its step_time (the one of median length counts). Two predictions stand beside each: from
the known times and the links that the run measured, and from passes and links as the run measured both, which is what a plan
holds after `ZeroBubbleCallback` has measured. Each plan appends one line of JSON, which `cooptimizer_report` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L

import lightning_zb
from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.planfile import write_plan
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.timeline import Timeline, predict_with
from recipes.benchmarks import emulated
from recipes.benchmarks.emulated import WIDTH, EmulatedModule

Row = dict[str, Any]

_FLOATS = 4096
"""Held by the lightest layer from F to B, so that a few bytes more or less do not count."""
_UNIT = {"mixer": (5.0, 8.0, 2.5), "feed-forward": (3.5, 4.0, 3.5), "head": (15.0, 15.0, 12.5)}
"""Times of F, B and W."""
_HELD = {"mixer": (1, 3), "feed-forward": (2, 2), "head": (2, 4)}
"""What a layer holds from B to W and from F to B."""
LAYERS = ("mixer", "feed-forward") * 5 + ("head",)
_WARM_STEPS, _FREE_STEPS = 2, 4
_PROFILED_STEPS = 9
"""One counts bytes; of the others a quarter runs as the plan says, without a layer's times taken."""


def known_costs(unit: float) -> CostModel:
    """The layers, between ends of the model that take no time.

    Args:
        unit: seconds of one unit of `_UNIT`.
    """
    layers = []
    for i, kind in enumerate(LAYERS):
        forward, backward_input, backward_weight = (unit * t for t in _UNIT[kind])
        stash, held = (4.0 * _FLOATS * n for n in _HELD[kind])
        layers.append(LayerCost(f"layers.{i}", forward, backward_input, backward_weight, held, stash, output_bytes=4.0 * WIDTH))
    return emulated.known_costs(layers)


def plans(num_devices: int, costs: CostModel) -> Iterator[tuple[str, Plan]]:
    """Named schedules with even and with uneven layers, and the co-optimizer's plans."""
    p, m = num_devices, 2 * num_devices
    yield "1f1b", make_plan(costs, p, m, "1f1b", partition="even")
    yield "interleaved", make_plan(costs, p, m, "interleaved", partition="even")
    yield "mist", make_plan(costs, p, m, "1f1b", partition="balanced")
    yield "zb", make_plan(costs, p, m, "zb", 1.0, partition="even")
    yield "zb-v", make_plan(costs, p, m, "zb-v", 1.0, partition="even")
    yield "auto, budget 1", make_plan(costs, p, m, "auto", 1.0, effort=2)
    yield "auto, budget 2", make_plan(costs, p, m, "auto", 2.0, effort=2)
    if p == 4:  # one chunk beside three that are not adjacent, devices in no order
        yield "odd", make_plan(costs, p, m, "zb", 1.5, partition=[1, 2, 3, 1, 2, 1, 1], placement=[2, 0, 1, 2, 0, 2, 3])


class _Watch(L.Callback):
    """Notes when steps end; from a step on, lets none begin before all devices have ended the one before."""

    def __init__(self, num_free_steps: int) -> None:
        self.num_free_steps = num_free_steps
        self.ends: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.is_between_steps and trainer.global_step >= self.num_free_steps:
            trainer.strategy.barrier()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.is_between_steps:
            self.ends.append(perf_counter())

    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.everyone = trainer.strategy.pipeline.gather(self.ends)

    @property
    def period(self) -> float:
        """Seconds of a free step, of the device where it takes longest."""
        return max((ends[self.num_free_steps - 1] - ends[_WARM_STEPS - 1]) / _FREE_STEPS for ends in self.everyone)


def run(name: str, plan: Plan, directory: Path) -> Row | None:
    """Train a few steps; on the rank that plans the row, elsewhere None."""
    write_plan(plan, directory / "plan.json")
    first = _WARM_STEPS + _FREE_STEPS
    measure = lightning_zb.ZeroBubbleCallback((first, first + _PROFILED_STEPS), replan="off", check_every=0, report=False)
    watch = _Watch(first)
    layers = plan.costs.layers[1:-1]
    module = EmulatedModule(
        [(c.forward, c.backward_input, c.backward_weight) for c in layers],
        [(int(c.weight_stash_bytes / 4), int(c.activation_bytes / 4)) for c in layers],
    )
    strategy = lightning_zb.ZeroBubbleStrategy(str(directory / "plan.json"), check_data_steps=0)
    num_steps = first + _PROFILED_STEPS
    emulated.train(module, strategy, plan.num_devices, plan.num_microbatches, num_steps, [watch, measure])
    if measure.profile is None:
        return None
    assert isinstance(measure.profile.timeline, Timeline)
    assert isinstance(measure.profile.costs, CostModel)
    timeline, profiled = measure.profile.timeline, measure.profile.costs
    known = replace(plan.costs, link=profiled.link)
    row: Row = {
        "part": "fidelity",
        "name": f"{name} P={plan.num_devices}",
        "P": plan.num_devices,
        "m": plan.num_microbatches,
        "chunks": [len(plan.placement.chunks_of(d)) for d in range(plan.num_devices)],
        "measured": {"step_time": timeline.step_time, "makespan": timeline.makespan, "period": watch.period},
        "measured_bytes": list(measure.profile.peak_bytes),
    }
    for which, costs in (("known", known), ("profiled", profiled)):
        found = predict_with(plan, costs)
        row[which] = {figure: getattr(found, figure) for figure in ("step_time", "makespan", "period")}
        row[f"{which}_bytes"] = list(found.peak_bytes)
    return row


def time_error(row: Row, prediction: str = "profiled", figure: str = "step_time") -> float:
    """By what share of the prediction the measured seconds are more."""
    return row["measured"][figure] / row[prediction][figure] - 1


def bytes_error(row: Row, prediction: str = "profiled") -> float:
    """As `time_error` for the peak of the device that is furthest off."""
    errors = [m / p - 1 for m, p in zip(row["measured_bytes"], row[f"{prediction}_bytes"], strict=True)]
    return max(errors, key=abs)


_TIMES = [(figure, which) for figure in ("step_time", "period") for which in ("known", "profiled")]
_PEAKS = ("known", "profiled")


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each plan, and the mean and the largest error."""
    head = ["plan", "P", "m", "chunks of devices", "step_time (ms)", "from known times", "from measured times", "period (ms)",
            "from known times", "from measured times", "peak, from known bytes", "from measured bytes"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["name"].rpartition(" ")[0], str(row["P"]), str(row["m"]), " ".join(map(str, row["chunks"]))]
        for figure, which in _TIMES:
            if which == "known":
                cells.append(f"{1e3 * row['measured'][figure]:.0f}")
            cells.append(f"{1e3 * row[which][figure]:.0f} ({time_error(row, which, figure):+.1%})")
        cells += [f"{bytes_error(row, which):+.1%}" for which in _PEAKS]
        lines.append(f"| {' | '.join(cells)} |")
    for name, of in (("mean error", lambda errors: sum(errors) / len(errors)), ("largest error", max)):
        times = [f"{of([abs(time_error(row, which, figure)) for row in rows]):.1%}" for figure, which in _TIMES]
        peaks = [f"{of([abs(bytes_error(row, which)) for row in rows]):.1%}" for which in _PEAKS]
        cells = [name, "", "", "", "", *times[:2], "", *times[2:], *peaks]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    """Run the plans that the arguments name and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=float, default=2.0, help="milliseconds of a unit; a feed-forward layer's F takes 3.5")
    parser.add_argument("--only", nargs="*", default=[], help="plans by name; default: all")
    parser.add_argument("--results", type=Path, help="rows are appended here")
    args = parser.parse_args(argv)
    emulated.quietly()
    rows: list[Row] = []
    for name, plan in plans(int(os.environ["WORLD_SIZE"]), known_costs(1e-3 * args.unit)):
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            row = run(name, plan, Path(directory))
        if row is None:
            continue
        rows.append(row)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if rows:
        print("\n".join(table(rows)), end="")


if __name__ == "__main__":
    main()
