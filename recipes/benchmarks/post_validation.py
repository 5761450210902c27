"""What a step takes with and without post-validation, beside what the plan says, on layers that take known times.

    torchrun --standalone --nproc-per-node 4 -m recipes.benchmarks.post_validation --unit 0.04

Every pass of a chunk takes `--unit` seconds, the schedule is zb-v with two microbatches' worth of activations. A row is a
run: how steps end, what share of them clips (only the last device to finish sees it, so all others have to roll back),
and the seconds from the end of one step to the end of the next. Without a barrier the plan predicts `period`, with one
`makespan`: once from the known times, once from passes and links as the run itself measured them afterwards. Times are in
milliseconds; "outside" is what a step spends outside its schedule: the optimizer's step and Lightning's work on its batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L

import lightning_zb
from lightning_zb.planning.costs import LayerCost
from lightning_zb.planning.planfile import write_costs
from lightning_zb.planning.timeline import predict_with
from recipes.benchmarks import emulated
from recipes.benchmarks.emulated import EmulatedModule

_WARM_STEPS = 2
_PROFILE_STEPS = 6
_MAX_NORM = 1e6


class _Watch(L.Callback):
    """Notes when steps end, and makes some of them clip.

    Args:
        num_steps: steps to note.
        clipping: which of them clip.
    """

    def __init__(self, num_steps: int, clipping: frozenset[int]) -> None:
        self.num_steps, self.clipping = num_steps, clipping
        self.ends: list[float] = []
        self.inside: list[float] = []
        self.counters: dict[str, Any] = {}
        self.everyone: list[tuple[list[float], list[float], dict[str, Any]]] | None = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
        pipeline = trainer.strategy.pipeline
        if trainer.global_step in self.clipping and pipeline.finishing_order[-1] in pipeline.devices:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            gradient.fill_(1e3 * _MAX_NORM)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.is_between_steps and len(self.ends) <= self.num_steps:
            self.ends.append(perf_counter())
            self.inside.append(trainer.strategy.pipeline.last_step_seconds)
            self.counters = trainer.strategy.statistics

    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.everyone = trainer.strategy.pipeline.gather((self.ends, self.inside, self.counters))


@dataclass(frozen=True, slots=True)
class _Row:
    """One run.

    Args:
        mode: `post_validation` of the strategy.
        clip_rate: share of steps that clip.
    """

    mode: str
    clip_rate: float


def _run(row: _Row, args: argparse.Namespace) -> str | None:
    """Train; on rank 0 the row of the table."""
    num_devices, unit = int(os.environ["WORLD_SIZE"]), args.unit
    num_steps = max(args.steps, round(1 / row.clip_rate) if row.clip_rate else 0)
    every = round(1 / row.clip_rate) if row.clip_rate else num_steps + 1
    clipping = frozenset(range(every - 1, num_steps, every)) if row.clip_rate else frozenset()
    last = num_steps + _WARM_STEPS
    watch = _Watch(last, frozenset(step + _WARM_STEPS for step in clipping))
    measure = lightning_zb.ZeroBubbleCallback((last, last + _PROFILE_STEPS), replan="off", check_every=0, report=False)
    layer = LayerCost("layer", unit, unit, unit, 1.0, 1.0, 0.0, 0.0)
    with tempfile.TemporaryDirectory() as directory:
        costs = Path(directory) / "costs.json"
        write_costs(emulated.known_costs([layer] * (2 * num_devices)), costs)
        strategy = lightning_zb.ZeroBubbleStrategy("zb-v", 2.0, costs=costs, post_validation=row.mode, check_data_steps=0)
        module = EmulatedModule([(unit,) * 3] * (2 * num_devices))
        emulated.train(
            module, strategy, num_devices, args.microbatches, last + _PROFILE_STEPS, [watch, measure],
            gradient_clip_val=_MAX_NORM,
        )  # fmt: skip
    if watch.everyone is None:
        return None
    assert measure.profile is not None
    assert measure.profile.costs is not None
    periods = [[b - a for a, b in pairwise(ends[_WARM_STEPS - 1 : last])] for ends, _, _ in watch.everyone]
    outside = max(
        statistics.median(p) - statistics.median(inside[_WARM_STEPS:last])
        for p, (_, inside, _) in zip(periods, watch.everyone, strict=True)
    )
    median, mean = (max(of(p) for p in periods) for of in (statistics.median, statistics.fmean))
    plan, seen = strategy.plan, measure.profile.costs
    known = plan.predicted
    measured = predict_with(plan, seen)
    name = "makespan" if row.mode == "off" else "period"
    counts = {key: sum(counters[key] for _, _, counters in watch.everyone) for key in ("rollbacks", "redone_forwards")}
    cells = [
        f"{num_devices}", f"{args.microbatches}", f"{unit * 1e3:g}", row.mode, f"{row.clip_rate:.0%}", f"{median * 1e3:.0f}",
        f"{mean * 1e3:.0f}", f"{outside * 1e3:.0f}", name,
        *(f"{getattr(p, name) * 1e3:.0f} ({median / getattr(p, name) - 1:+.1%})" for p in (known, measured)),
        *(str(count) for count in counts.values()),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the rows that the arguments name and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of F, of B and of W of a chunk")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=8, help="steps to measure; more for a low clip rate")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.0, 1.0], help="shares of steps that clip")
    parser.add_argument("--no-off", action="store_true", help="leave out the run with post_validation='off'")
    args = parser.parse_args()
    emulated.quietly()
    heads = [
        *("devices", "microbatches", "unit", "mode", "clips", "median", "mean", "outside", "prediction"),
        *("from known times", "from measured times", "rollbacks", "redone forwards"),
    ]
    is_first = os.environ.get("RANK") == "0"
    if is_first:
        print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    for row in [*([] if args.no_off else [_Row("off", 0.0)]), *(_Row("exact", rate) for rate in args.rates)]:
        line = _run(row, args)
        if is_first:
            print(line, flush=True)


if __name__ == "__main__":
    main()
