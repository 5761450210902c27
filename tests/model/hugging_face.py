"""Tiny random Hugging Face causal language models inside a LightningModule, as users write it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import transformers as T
from torch import Tensor

from recipes.models.families import VOCABULARY, configuration


def config(name: str, **options: Any) -> T.PretrainedConfig:
    """A configuration of four layers (nemotron_h: five)."""
    return configuration(name, 5 if name == "nemotron_h" else 4, **options)


class CausalLanguageModel(L.LightningModule):
    def __init__(self, name: str, *, checkpointing: bool = False, seed: int | None = 0, **options: Any) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.model = T.AutoModelForCausalLM.from_config(config(name, **options)).float().train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def texts(num: int, *, padded: bool = False, length: int = 12) -> list[tuple[dict[str, Tensor], int]]:
    """Microbatches of token ids with labels; with left padding where asked."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for j in range(num):
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            mask = torch.ones_like(ids)
            mask[1, : 3 + j] = 0
            batch["attention_mask"] = mask
            batch["labels"][mask == 0] = -100
        found.append((batch, j))
    return found
