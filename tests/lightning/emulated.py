"""Layers that take known times, as the benchmarks have them, which note how long they really took."""

from __future__ import annotations

import time

from torch import Tensor, nn

from recipes.benchmarks.emulated import WIDTH, EmulatedLayer, EmulatedModule


class SleepingLayer(EmulatedLayer):
    """An emulated layer with a product in front of it, whose gradients are computed for real."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__(seconds)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.slept: dict[str, list[float]] = {"F": [], "B": [], "W": []}

    def spend(self, part: str) -> None:
        start = time.perf_counter()
        super().spend(part)
        self.slept[part].append(time.perf_counter() - start)

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        y = super().forward(self.linear(x))
        self.slept["F"][-1] = time.perf_counter() - start  # with the product: after a sleep its cold caches take 1 to 2 ms
        return y


class SleepingModule(EmulatedModule):
    """Args: for each layer the milliseconds of F, B and W, and from which step on which factor slows which layer down."""

    def __init__(self, milliseconds: list[tuple[float, float, float]], slow: tuple[int, int, float] | None = None) -> None:
        super().__init__([])
        self.layers = nn.ModuleList(
            SleepingLayer(dict(zip("FBW", (t / 1e3 for t in layer), strict=True))) for layer in milliseconds
        )
        self.slow = slow

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if self.slow is not None and self.trainer.global_step >= self.slow[0]:
            layer = self.layers[self.slow[1]]
            layer.seconds = {part: seconds * self.slow[2] for part, seconds in layer.seconds.items()}
            self.slow = None
