"""Modules and settings that a pipeline must refuse, each for one reason."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

from tests.lightning.models import SequentialModule, TokenModule


class NoStack(SequentialModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)


class NeverReached(SequentialModule):
    def loss(self, batch):
        x, y = batch
        return (x.sum() - y).square().mean() * self.model[0][0].weight.sum()


class ReachedTwice(SequentialModule):
    def loss(self, batch):
        x, y = batch
        return (self.model(x) + self.model(2 * x) - y).square().mean()


class Manual(SequentialModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(SequentialModule):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.model[:4].parameters(), lr=0.1), torch.optim.SGD(self.model[4:].parameters(), lr=0.1)]


class Raises(SequentialModule):
    """One rank fails in its second step."""

    def loss(self, batch):
        if self.global_step == 1 and self.trainer.global_rank == 1:
            raise ArithmeticError("the user's own mistake")
        return super().loss(batch)


class BypassesTheLayers(TokenModule):
    def loss(self, batch):
        embedded = self.net.embedding(batch["input_ids"])
        x = embedded
        for layer in self.net.layers:
            x = layer(x)
        return (self.net.head(self.net.norm(x + embedded))).logsumexp(-1).mean()


class ShufflesByRank(SequentialModule):
    """Draws once more on one rank: the loaders would part ways."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 1:
            torch.rand(1)


AT_SETUP: dict[str, tuple[type[L.LightningModule], dict, str]] = {
    "no stack": (NoStack, {}, r"found no nn.ModuleList or nn.Sequential with parameters in NoStack.*layers="),
    "wrong path": (SequentialModule, {"layers": "net.blocks"}, r'layers="net.blocks" names no module.*"model"'),
    "too few layers": (SequentialModule, {"schedule": "wave-5"}, r"8 layers|fewer|10 chunks"),
    "manual": (Manual, {}, r"^manual optimization decides .* set self\.automatic_optimization = True"),
    "two optimizers": (TwoOptimizers, {}, r"returned 2 optimizers; .* use one optimizer with several parameter groups"),
    "unknown schedule": (SequentialModule, {"schedule": "zbv"}, r"'zbv' is unknown; known are .*1f1b.*zb-v"),
    "no plan file": (
        SequentialModule,
        {"schedule": "none.json"},
        r"schedule='none.json' cannot be read \(No such.*lightning-zb plan",
    ),
    "no costs file": (
        SequentialModule,
        {"costs": "none.json"},
        r"costs='none.json' cannot be read \(No such.*lightning-zb profile",
    ),
    "no room": (
        SequentialModule,
        {"memory_budget": "1KiB"},
        r"'1KiB' does not fit: parameters and gradients .* write more than '",
    ),
    "too little memory": (SequentialModule, {"memory_budget": 0.01}, r"memory budget.*0\.\d+|smallest"),
}
IN_STEP: dict[str, tuple[type[L.LightningModule], str]] = {
    "never reached": (NeverReached, r"never reached the pipelined layers"),
    "reached twice": (ReachedTwice, r"runs the pipelined layers twice"),
    "bypassed": (BypassesTheLayers, r"without passing through them"),
    "raises": (Raises, r"the user's own mistake"),
    "other batches": (ShufflesByRank, r"training loader .* gives rank 1 other batches"),
}
