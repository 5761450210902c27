"""Does training through the pipeline leave the plain Trainer's bits? Every model, schedule, size and precision.

    python -m recipes.benchmarks.parity --results cells.jsonl --out report.md

trains each model twice, with the plain Trainer and with the strategy, from one seed on the same batches (two lengths,
half of them padded), gradients clipped, and compares every weight, every entry of the optimizer's state and the losses.
The table has a line for each model and a column for each schedule and number of devices: `=` bitwise, a figure (the
largest difference relative to the largest value of that tensor) where not, `refused` with the sentence below the table. All
devices of a pipeline run in one process, unless `--processes` asks for real ones, which build the model in
configure_model, each its own layers alone. `auto` measures layers in the first two steps, plans partition, placement and
order with what it found, moves weights and optimizer state, and takes one more step, the fourth, with the new plan. Each
cell is kept in the results file as soon as it is known, and a later run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor

from lightning_zb import ZeroBubbleCallback, ZeroBubbleStrategy
from recipes.benchmarks.parity_models import MODELS, batches, make

SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zb-v", "auto")
PRECISIONS = ("32-true", "bf16-mixed")
ACCUMULATE = 4
NUM_BATCHES = 10
"""Two whole groups and a shorter one: three optimizer steps."""
AUTO_BATCHES = NUM_BATCHES + ACCUMULATE
"""One step more for `auto`, which changes plans after the third."""
TOLERANCE = 1e-3
"""Above it a difference is no rounding."""


class Verdict(Enum):
    BITWISE = "bitwise"
    BOUNDED = "bounded"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the matrix.

    Args:
        model: name in `MODELS`.
        schedule: a registered schedule.
        devices: of the pipeline.
        precision: the Trainer's.
        processes: whether each device is a process of its own.
    """

    model: str
    schedule: str
    devices: int
    precision: str
    processes: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """What a setting came to.

    Args:
        setting: what ran.
        verdict: `Verdict`'s value.
        difference: the largest over all tensors of |a - b| / max |b|; 0 where every bit is equal.
        detail: how many tensors differ and which is the worst, or the sentence of the refusal.
        seconds: that the run took.
    """

    setting: Setting
    verdict: str
    difference: float
    detail: str
    seconds: float


class _Keep(L.Callback):
    """Writes what this process holds at the end of training, and the losses of the steps, to a file of its rank."""

    def __init__(self, directory: Path, num_batches: int) -> None:
        self.directory, self.num_batches = directory, num_batches
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % ACCUMULATE == 0 or batch_idx + 1 == self.num_batches:
            self.losses.append(outputs["loss"].detach().float())

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        owns = getattr(trainer.strategy, "owns", lambda p: True)
        names = {id(p): name for name, p in module.named_parameters()}
        found = {f"weight {name}": p.detach().clone() for name, p in module.named_parameters() if owns(p)}
        for p, state in trainer.optimizers[0].state.items():
            if owns(p):
                found |= {f"{key} of {names[id(p)]}": torch.as_tensor(value).clone() for key, value in state.items()}
        if trainer.is_global_zero:
            found["losses"] = torch.stack(self.losses)
        torch.save(found, self.directory / f"{trainer.global_rank}.pt")


def train(
    model: str,
    precision: str,
    devices: int = 1,
    strategy: Any = "auto",
    late: bool = False,
    num_batches: int = NUM_BATCHES,
) -> dict[str, Tensor]:
    """Everything that training leaves, by name; `late`: the model is built in configure_model."""
    L.seed_everything(5, verbose=False)
    module = make(model, late)
    loader: Any = torch.utils.data.DataLoader(batches(num_batches), batch_size=None)  # type: ignore[arg-type]
    with TemporaryDirectory() as directory:
        callbacks: list[L.Callback] = [_Keep(Path(directory), num_batches)]
        if isinstance(strategy, ZeroBubbleStrategy) and strategy.plan_request.schedule == "auto":
            callbacks.append(
                ZeroBubbleCallback((0, 2), "placement", min_gain=-10.0, plan_seconds=2.0, background=False, report=False)
            )
        trainer = L.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, precision=precision, max_epochs=1,  # type: ignore[arg-type]
            accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0, callbacks=callbacks, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader)
        found: dict[str, Tensor] = {}
        for path in sorted(Path(directory).glob("*.pt")):
            found |= torch.load(path)
    return found


def compare(found: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, and which tensors differ.

    Raises:
        RuntimeError: a tensor is missing, or there are more than there should be.
    """
    if set(found) != set(plain):
        raise RuntimeError(f"only one of the two runs has {sorted(set(found) ^ set(plain))}")
    differences = {}
    for name, expected in plain.items():
        if not torch.equal(found[name], expected):
            largest = expected.double().abs().max().clamp_min(1e-30)
            differences[name] = float((found[name].double() - expected.double()).abs().max() / largest)
    if not differences:
        return 0.0, f"{len(plain)} tensors"
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst], f"{len(differences)} of {len(plain)} tensors, most {worst}"


def measure(setting: Setting, plain: dict[str, Tensor]) -> Cell:
    """Train one setting and compare it."""
    began = time.perf_counter()
    try:
        if setting.processes:
            strategy = ZeroBubbleStrategy(setting.schedule, start_method="fork", timeout=600.0)
            found = train(setting.model, setting.precision, setting.devices, strategy, True, num_batches(setting))
        else:
            strategy = ZeroBubbleStrategy(setting.schedule, virtual_devices=setting.devices)
            found = train(setting.model, setting.precision, strategy=strategy, num_batches=num_batches(setting))
        difference, detail = compare(found, plain)
        bounded = Verdict.BOUNDED if difference < TOLERANCE else Verdict.FAILED  # NaN fails
        verdict = bounded if difference else Verdict.BITWISE
    except Exception:  # a model that fails is a cell too
        trace = traceback.format_exc().strip().splitlines()
        raised_in = [line for line in trace if line.lstrip().startswith("File ")][-1]  # of another process's trace too
        verdict = Verdict.REFUSED if "lightning_zb" in raised_in else Verdict.FAILED
        difference, detail = 0.0, trace[-1]
    return Cell(setting, verdict.value, difference, detail, time.perf_counter() - began)


def num_batches(setting: Setting) -> int:
    """Batches that a setting trains on."""
    return AUTO_BATCHES if setting.schedule == "auto" else NUM_BATCHES


def read_cells(path: Path | None) -> list[Cell]:
    """The cells of a results file."""
    if path is None or not path.exists():
        return []
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [Cell(**{**value, "setting": Setting(**value["setting"])}) for value in values]


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return {"bitwise": "=", "bounded": f"{cell.difference:.1e}"}.get(cell.verdict, cell.verdict)


def table(cells: Sequence[Cell], precision: str, processes: bool) -> list[str]:
    """The lines of one table, and below it what needs a sentence."""
    chosen = {c.setting: c for c in cells if (c.setting.precision, c.setting.processes) == (precision, processes)}
    if not chosen:
        return []
    columns = sorted({(s.devices, SCHEDULES.index(s.schedule)) for s in chosen})
    lines = [
        f"## {precision}, {'one process a device, built in configure_model' if processes else 'all devices in one process'}",
        "",
        "| model | " + " | ".join(f"{SCHEDULES[s]} P={d}" for d, s in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for model in MODELS:
        marks = [_mark(chosen.get(Setting(model, SCHEDULES[s], d, precision, processes))) for d, s in columns]
        if any(marks):
            lines.append(f"| {model} | " + " | ".join(marks) + " |")
    sentences: dict[str, set[str]] = {}
    for setting, cell in chosen.items():
        if cell.verdict != Verdict.BITWISE.value:
            sentences.setdefault(f"{setting.model}, {cell.verdict}: {cell.detail}", set()).add(
                f"{setting.schedule} P={setting.devices}"
            )
    listed = [f"- {text} ({', '.join(sorted(where))})" for text, where in sentences.items()]
    return [*lines, "", *listed, *([""] if listed else [])]


def report(cells: Sequence[Cell], command: str) -> str:
    """The Markdown report."""
    counts = {verdict.value: sum(c.verdict == verdict.value for c in cells) for verdict in Verdict}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    head = [
        f"# Parity with the plain Trainer, {date.today().isoformat()}",
        "",
        f"{platform.machine()}, CPU, torch {torch.__version__}, lightning {L.__version__}, "
        f"transformers {transformers.__version__}. `{command}`",
        "",
        f"{len(cells)} cells: {summary}. `=`: every weight, optimizer state and loss has the same bits after three steps, "
        "`auto` after four.",
        "",
    ]
    tables = [line for processes in (False, True) for p in PRECISIONS for line in table(cells, p, processes)]
    return "\n".join(head + tables).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write the report where asked."""
    parser = argparse.ArgumentParser(description="parity with the plain Trainer")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--devices", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--processes", action="store_true", help="a process for each device")
    parser.add_argument("--results", type=Path, help="where cells are kept")
    parser.add_argument("--out", type=Path, help="the report to write")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    cells = {c.setting: c for c in read_cells(options.results)}
    for model in options.models:
        for precision in options.precisions:
            wanted = [
                setting
                for devices in options.devices
                for schedule in options.schedules
                if (setting := Setting(model, schedule, devices, precision, options.processes)) not in cells
            ]
            plain = {n: train(model, precision, num_batches=n) for n in sorted({num_batches(setting) for setting in wanted})}
            for setting in wanted:
                cell = cells[setting] = measure(setting, plain[num_batches(setting)])
                print(f"{model:24} {precision:10} {setting.schedule:12} P={setting.devices} {_mark(cell)}", flush=True)
                if options.results is not None:
                    with options.results.open("a") as file:
                        file.write(json.dumps(asdict(cell)) + "\n")
    text = report(list(cells.values()), "python -m recipes.benchmarks.parity" + (" --processes" if options.processes else ""))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
