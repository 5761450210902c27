"""Fit one case and return all that must be equal: weights, optimizer state, learning rates, logged losses."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.planner import make_plan
from tests.lightning.models import MODELS, SplitTokens, dataset

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Case:
    """One training run; `strategy=None` is the plain Trainer, with Lightning's own `plain_strategy`."""

    name: str
    model: str
    model_options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] | None = None
    plain_strategy: str = "auto"
    devices: int = 1
    size: int = 48
    batch_size: int = 2
    accumulate: int = 4
    validate: bool = False
    shuffle: bool = True
    split_by_rank: bool = False
    save: str | None = None
    resume: str | None = None
    callback: dict[str, Any] | None = None
    checkpoint: tuple[int, str] | None = None
    """After which step to save a checkpoint, and where."""
    save_last: str | None = None
    """Folder in which ModelCheckpoint keeps `last.ckpt`, written at the end of each epoch."""
    watch: bool = False
    """Whether to note the weights that callbacks see at every flush point."""
    count_collectives: bool = False
    """Whether to count collectives until the end of each step."""
    raises: bool = False
    """Whether the run must fail; its result has the message."""
    gains_after: int | None = None
    """After which step to switch to a plan by which devices can run out of step."""
    scaler: dict[str, Any] | None = None
    """Options of a loss scaler; with it the run is 16-mixed."""

    def plain(self) -> Case:
        return Case(**{**self.__dict__, "strategy": None, "devices": 1, "callback": None})


class Norms(L.Callback):
    """Learning rate after each batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer, *args) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Checkpoint(L.Callback):
    """Saves in the middle of an epoch, when the step before is still to be validated."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path, self.was_pending = step, path, False

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            pipeline = getattr(trainer.strategy, "pipeline", None)
            self.was_pending = pipeline is not None and pipeline.ending.is_pending
            trainer.save_checkpoint(self.path)


class Gains(L.Callback):
    """Switches, after a step, to a plan with costs by which devices can run out of step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *args) -> None:
        if (
            trainer.global_step != self.step
            or trainer.fit_loop._should_accumulate()
            or not hasattr(trainer.strategy, "pipeline")
        ):
            return
        plan = trainer.strategy.plan
        first, *middle, last = (len(chunk) for chunk in plan.partition.chunks)
        sizes = [first - 1, *middle, last - 1]  # without prologue and epilogue
        layers = [replace(plan.costs.layers[i], **_even(len(chunk))) for chunk in plan.partition.chunks for i in chunk]
        costs = CostModel(tuple(layers))
        trainer.strategy.pipeline.switch(make_plan(costs, plan.num_devices, plan.num_microbatches, "zb-v", 2.0, sizes))


def _even(num_layers: int) -> dict[str, float]:
    """Costs of each of a chunk's layers by which all chunks cost the same."""
    return dict.fromkeys(("forward", "backward_input", "backward_weight"), 1 / num_layers) | {"backward": None}


class Collectives(L.Callback):
    """How many collectives this rank has taken part in when each step ends."""

    NAMES = ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list", "gather_object")

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._num_calls = 0

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            return function(*args, **kwargs)

        return counted

    def on_train_start(self, trainer, module) -> None:
        self._patch = pytest.MonkeyPatch()
        for name in self.NAMES:
            self._patch.setattr(torch.distributed, name, self._counting(getattr(torch.distributed, name)))

    def on_train_batch_end(self, trainer, *args) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.counts.append(self._num_calls)

    def on_train_end(self, trainer, module) -> None:
        self._patch.undo()


class Watch(L.Callback):
    """The weights that a callback sees at the flush points, of the parameters this rank owns."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, torch.Tensor]]] = []

    def _note(self, name: str, trainer: L.Trainer) -> None:
        owned = {n: p for n, p in trainer.lightning_module.named_parameters() if _owned(trainer, p)}
        self.seen.append((name, trainer.global_step, {n: p.detach().clone() for n, p in owned.items()}))

    def on_validation_start(self, trainer, module) -> None:
        self._note("validation", trainer)

    def on_train_epoch_end(self, trainer, module) -> None:
        self._note("epoch end", trainer)

    def on_train_end(self, trainer, module) -> None:
        self._note("end", trainer)

    def on_exception(self, trainer, module, exception) -> None:
        self._note("exception", trainer)


def run(case: Case, directory: Path) -> dict[str, Any]:
    """Fit the case; what this rank owns of the result."""
    import lightning_zb

    L.seed_everything(5, verbose=False)
    module = MODELS[case.model](**case.model_options)
    norms, watch, collectives = Norms(), Watch(), Collectives()
    callbacks: list[L.Callback] = [norms, *([watch] if case.watch else []), *([collectives] if case.count_collectives else [])]
    if case.checkpoint is not None:
        callbacks.append(Checkpoint(*case.checkpoint))
    if case.save_last is not None:
        callbacks.append(ModelCheckpoint(case.save_last, save_last=True, save_top_k=0))
    if case.gains_after is not None:
        callbacks.append(Gains(case.gains_after))
    measuring = [] if case.callback is None else [lightning_zb.ZeroBubbleCallback(**case.callback)]
    callbacks += measuring
    options: dict[str, Any] = {"max_epochs": 2, **case.trainer}
    if case.scaler is not None:  # Trainer(precision="16-mixed") would be bf16-mixed on a CPU
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **case.scaler))
    if case.strategy is not None:
        options["strategy"] = lightning_zb.ZeroBubbleStrategy(**case.strategy)
    else:
        options["strategy"] = case.plain_strategy
    trainer = L.Trainer(
        accelerator="cpu", devices=case.devices, accumulate_grad_batches=case.accumulate, callbacks=callbacks,
        logger=CSVLogger(directory, name="", version=case.name), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=case.save_last is not None, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    data = SplitTokens(case.size) if case.split_by_rank else dataset(case.model, case.size)
    train = torch.utils.data.DataLoader(data, batch_size=case.batch_size, shuffle=case.shuffle)
    validation = torch.utils.data.DataLoader(dataset(case.model, 8), batch_size=4) if case.validate else None
    error = None
    try:
        trainer.fit(module, train, validation, ckpt_path=case.resume)
    except RuntimeError as raised:
        if not case.raises:
            raise
        error = str(raised)
    if case.save is not None:
        trainer.save_checkpoint(case.save)
    optimizer = trainer.optimizers[0]
    names = {id(p): n for n, p in module.named_parameters()}
    own = {n: p.detach().clone() for n, p in module.named_parameters() if _owned(trainer, p)}
    state = {
        names[id(p)]: {k: torch.as_tensor(v).clone() for k, v in s.items()}
        for p, s in optimizer.state.items()
        if _owned(trainer, p)
    }
    log = Path(directory) / case.name / "metrics.csv"
    return {
        "weights": own,
        "optimizer": state,
        "order": [names[id(p)] for g in optimizer.param_groups for p in g["params"]],
        "rates": norms.rates,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "log": users_log(log.read_text()) if trainer.is_global_zero and log.exists() else None,
        "steps": trainer.global_step,
        "error": error,
        "collectives": collectives.counts,
        "seen": watch.seen,
        "was_pending": any(c.was_pending for c in callbacks if isinstance(c, Checkpoint)),
        "buffers": {n: b.clone() for n, b in module.named_buffers() if _held(trainer, n)},
        "scaler": None if case.scaler is None else trainer.precision_plugin.scaler.state_dict(),
        "statistics": getattr(trainer.strategy, "statistics", None),
        "devices": () if case.strategy is None else trainer.strategy.pipeline.devices,
        "own_bytes": sum(p.numel() * p.element_size() for p in own.values()),
        "plan_passes": _planned(trainer),
        "partition": None if case.strategy is None else [len(chunk) for chunk in trainer.strategy.plan.partition.chunks],
        "state_bytes": None if case.strategy is None else sum(c.state_bytes or 0.0 for c in trainer.strategy.plan.costs.layers),
        "decisions": [d for callback in measuring for d in callback.decisions],
        "num_chunks": trainer.strategy.plan.placement.num_chunks if case.strategy is not None else 1,
    }


def users_log(text: str) -> list[dict[str, str]]:
    """The rows of a metrics file, without the pipeline's own figures."""
    rows = [{k: v for k, v in row.items() if not k.startswith("zb/")} for row in csv.DictReader(text.splitlines())]
    return [row for row in rows if any(value for key, value in row.items() if key not in ("epoch", "step"))]


def _owned(trainer: L.Trainer, parameter: torch.nn.Parameter) -> bool:
    owns = getattr(trainer.strategy, "owns", None)
    return True if owns is None else owns(parameter)


def _held(trainer: L.Trainer, buffer: str) -> bool:
    pipeline = getattr(trainer.strategy, "pipeline", None)
    return pipeline is None or buffer in pipeline.ownership.buffers


def _planned(trainer: L.Trainer) -> int | None:
    plan = getattr(trainer.strategy, "plan", None)
    return None if plan is None else sum(1 for _ in plan.schedule.passes())


def differences(parts: list[dict[str, Any]], plain: dict[str, Any]) -> list[str]:
    """Every difference between a split run (one result a rank) and the plain one; empty when all bits agree."""
    found = []
    weights: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for part in parts:
        twice = set(weights) & set(part["weights"])
        found += [f"{name} is owned twice" for name in twice]
        weights.update(part["weights"])
        optimizer.update(part["optimizer"])
    found += [f"missing {name}" for name in set(plain["weights"]) ^ set(weights)]
    found += [f"weight {n}" for n, w in plain["weights"].items() if n in weights and not torch.equal(w, weights[n])]
    found += [f"optimizer state of {n}" for n in set(plain["optimizer"]) ^ set(optimizer)]
    for name, state in plain["optimizer"].items():
        other = optimizer.get(name, {})
        found += [f"{k} of {name}" for k in state if k not in other or not torch.equal(state[k], other[k])]
    for point, (name, step, seen) in enumerate(plain["seen"]):
        theirs = [part["seen"][point] if point < len(part["seen"]) else ("nothing", 0, {}) for part in parts]
        found += [f"at step {step} rank {r} sees {t[0]}, not {name}" for r, t in enumerate(theirs) if t[:2] != (name, step)]
        merged = {n: w for t in theirs for n, w in t[2].items()}
        found += [f"{n} at {name} of step {step}" for n, w in seen.items() if n not in merged or not torch.equal(w, merged[n])]
    buffers = {name: buffer for part in parts for name, buffer in part["buffers"].items()}
    found += [f"buffer {n}" for n, b in plain["buffers"].items() if n not in buffers or not torch.equal(b, buffers[n])]
    found += [f"scaler on rank {r}" for r, part in enumerate(parts) if part["scaler"] != plain["scaler"]]
    found += [key for key in ("order", "rates", "log", "steps", "metrics") if parts[0][key] != plain[key]]
    found += [f"order on rank {r}" for r, part in enumerate(parts) if part["order"] != plain["order"]]
    return found
