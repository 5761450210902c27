"""A module whose layers take known times for F, B and W, by sleeping, so that a small machine can time a pipeline."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zb.execution import entry_points
from lightning_zb.execution.deferred_ops import WeightWork

WIDTH = 8


def sleep(layer: SleepingLayer, part: str) -> None:
    """Sleep as long as the part takes, and note how long it really was."""
    start = time.perf_counter()
    time.sleep(layer.seconds[part])
    layer.slept[part].append(time.perf_counter() - start)


class _Sleep(torch.autograd.Function):
    """Identity; sleeps in F and B, and leaves work to W that sleeps and adds nothing to the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer, ctx.recorder = layer, entry_points._Active.recorder
        sleep(layer, "F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        layer = ctx.layer
        sleep(layer, "B")
        if ctx.recorder is None:
            sleep(layer, "W")
        else:
            ctx.recorder.defer(WeightWork((layer.linear.weight,), _sleep_weight, (layer,)))
        return g, None


def _sleep_weight(layer: SleepingLayer) -> tuple[Tensor]:
    sleep(layer, "W")
    return (torch.zeros_like(layer.linear.weight),)


class SleepingLayer(nn.Module):
    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.slept: dict[str, list[float]] = {"F": [], "B": [], "W": []}

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        y = _Sleep.apply(self.linear(x), self)
        self.slept["F"][-1] = time.perf_counter() - start  # with the product: after a sleep its cold caches take 1 to 2 ms
        return y


class SleepingModule(L.LightningModule):
    """Args: for each layer the milliseconds of F, B and W, and from which step on which factor slows which layer down."""

    def __init__(self, milliseconds: list[tuple[float, float, float]], slow: tuple[int, int, float] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SleepingLayer(dict(zip("FBW", (t / 1e3 for t in layer), strict=True))) for layer in milliseconds
        )
        self.head = nn.Linear(WIDTH, 1)
        self.slow = slow

    def training_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(self.head(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if self.slow is not None and self.trainer.global_step >= self.slow[0]:
            layer = self.layers[self.slow[1]]
            layer.seconds = {part: seconds * self.slow[2] for part, seconds in layer.seconds.items()}
            self.slow = None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
