"""A small transformer as one nn.Sequential."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.language_model import LanguageModel


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and added to its input.

    Args:
        width: features of a token.
        num_heads: attention heads; divides width.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, sequence, width] to the same shape."""
        heads = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class Embedding(nn.Module):
    """Token and position embeddings, added.

    Args:
        vocabulary_size: number of tokens.
        max_length: longest sequence.
        width: features of a token.
    """

    def __init__(self, vocabulary_size: int, max_length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(max_length, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [batch, sequence] to [batch, sequence, width]."""
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class SequentialLanguageModel(LanguageModel):
    """A transformer whose layers, embedding and head included, are one nn.Sequential.

    Args:
        vocabulary_size: number of tokens.
        width: features of a token.
        num_blocks: transformer blocks.
        num_heads: attention heads of a block.
        max_length: longest sequence.
        options: the optimizer's options, see LanguageModel.
    """

    def __init__(
        self,
        vocabulary_size: int = 256,
        width: int = 128,
        num_blocks: int = 6,
        num_heads: int = 4,
        max_length: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.model = nn.Sequential(
            Embedding(vocabulary_size, max_length, width),
            *(Block(width, num_heads) for _ in range(num_blocks)),
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary_size, bias=False),
        )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
