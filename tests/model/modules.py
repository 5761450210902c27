"""LightningModules as users write them."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


def tokens(num: int, batch: int = 2, seed: int = 0) -> list[tuple[Tensor, int]]:
    """Microbatches of token ids, as (batch, batch_idx)."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator), j) for j in range(num)]


def vectors(num: int, batch: int = 3, seed: int = 0) -> list[tuple[tuple[Tensor, Tensor], int]]:
    """Microbatches of (inputs, targets)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ((torch.randn(batch, WIDTH, generator=generator), torch.randn(batch, 1, generator=generator)), j) for j in range(num)
    ]


class SequentialModule(L.LightningModule):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        body = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers - 1)]
        self.model = nn.Sequential(*body, nn.Linear(WIDTH, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class LanguageModel(L.LightningModule):
    """Embedding, raw positions, blocks, norm and head, with what a test asks for."""

    def __init__(
        self,
        num_layers: int = 4,
        *,
        tied: bool = False,
        dropout: float = 0.0,
        checkpointed: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def run_blocks(self, x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[-1]) * 0.5
        for block in self.blocks:
            x = checkpoint(block, x, scale, use_reentrant=self.reentrant) if self.checkpointed else block(x, scale)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        x = self.embed(batch)
        x += self.positions
        logits = self.head(self.norm(self.run_blocks(x)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()), "logits": logits}
