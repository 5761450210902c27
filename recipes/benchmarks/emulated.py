"""A module whose layers take known times for F, B and W, by sleeping, and hold known bytes, and its training.

So a small machine can time a pipeline and count its memory.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zb.execution import entry_points
from lightning_zb.execution.deferred_ops import WeightWork
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole
from lightning_zb.strategy import ZeroBubbleStrategy

WIDTH = 8
_SPIN = 3e-4  # seconds before the end in which to watch the clock: a sleep alone ends late


def sleep_until(end: float) -> None:
    """Sleep until `time.perf_counter()` reaches a time, give or take some microseconds."""
    left = end - time.perf_counter() - _SPIN
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        pass


class _Emulated(torch.autograd.Function):
    """Identity; takes its time in F and B, and leaves W work that takes its time and adds nothing to a gradient.

    From F to B it holds its bytes, and from B to W those of them that W needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.recorder = layer, entry_points._Active.recorder
        for_weights, for_input = layer.held
        ctx.save_for_backward(*(x.new_empty(n) for n in (for_weights, for_input - for_weights)))
        layer.spend("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer, splits = ctx.layer, ctx.recorder is not None
        for_weights, _ = ctx.saved_tensors
        layer.spend("B")
        if not splits:
            layer.spend("W")
            return gradient, torch.zeros_like(layer.weight), None
        ctx.recorder.defer(WeightWork((layer.weight,), _work_on_weight, (layer, for_weights)))
        return gradient, None, None


def _work_on_weight(layer: EmulatedLayer, _held: Tensor) -> tuple[Tensor]:
    layer.spend("W")
    return (torch.zeros_like(layer.weight),)


class EmulatedLayer(nn.Module):
    """Args: seconds of F, B and W; floats held from B to W, and from F to B, for a microbatch."""

    def __init__(self, seconds: dict[str, float], held: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds, self.held = seconds, held

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Emulated.apply(x, self.weight, self)
        self.spend("F")
        return x

    def spend(self, part: str) -> None:
        """Take the time of F, B or W."""
        sleep_until(time.perf_counter() + self.seconds[part])


class EmulatedModule(L.LightningModule):
    """A stack of emulated layers and a head.

    Args:
        seconds: for each layer those of F, B and W.
        held: for each layer the floats that it holds for a microbatch from B to W, and from F to B; None for none.
    """

    def __init__(self, seconds: Sequence[tuple[float, float, float]], held: Sequence[tuple[int, int]] | None = None) -> None:
        super().__init__()
        each = zip(seconds, held or [(0, 0)] * len(seconds), strict=True)
        self.layers = nn.ModuleList(EmulatedLayer(dict(zip("FBW", times, strict=True)), floats) for times, floats in each)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(self.head(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def known_costs(layers: Sequence[LayerCost]) -> CostModel:
    """The costs of an emulated module: of its layers, between ends that take no time."""
    prologue, epilogue = (LayerCost(role.value, 0.0, 0.0, 0.0, role=role) for role in (LayerRole.PROLOGUE, LayerRole.EPILOGUE))
    return CostModel((prologue, *layers, epilogue))


def train(
    module: EmulatedModule,
    strategy: ZeroBubbleStrategy,
    num_devices: int,
    num_microbatches: int,
    num_steps: int,
    callbacks: list[L.Callback],
    **options: Any,
) -> None:
    """Train for some steps, with nothing beside them: no logger, no checkpoints, no progress bar.

    Args:
        module: what to train.
        strategy: how.
        num_devices: devices, each a process.
        num_microbatches: of a step.
        num_steps: optimizer steps.
        callbacks: of the Trainer.
        options: of the Trainer, besides.
    """
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_devices,
        strategy=strategy,
        accumulate_grad_batches=num_microbatches,
        max_steps=num_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    batches: Any = [(torch.ones(1, WIDTH), torch.ones(1, 1))] * (num_steps * num_microbatches)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))


def quietly() -> None:
    """Leave the terminal to the benchmark's table, and each process one thread."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
