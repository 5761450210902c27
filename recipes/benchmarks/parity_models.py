"""The LightningModules of the parity matrix, as users write them, and what is to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import transformers as T
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from recipes.models.families import VOCABULARY, WIDTH, configuration

NUM_LAYERS = 8
"""So that four devices of two chunks each have a layer for every chunk."""


class Trained(L.LightningModule):
    """What every cell trains: the model's own loss.

    Args:
        build: makes the model, which takes a batch as keywords and returns something with a loss.
        late: whether configure_model calls it, so that no process holds the whole model.
    """

    def __init__(self, build: Callable[[], Any], late: bool = False) -> None:
        super().__init__()
        self.build = build
        self.model: Any = None if late else build()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Supervised(Trained):
    """A loss on what layers in the middle return."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, output_hidden_states=True)
        return output.loss + 1e-3 * output.hidden_states[NUM_LAYERS // 2].square().mean()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.cumsum(1)))))


class _Pair(_Block):
    """Hands on two tensors, as fused state-space blocks do: what the next norm reads, and the residual."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        residual = residual + x
        return self.down(F.gelu(self.up(self.norm(residual.cumsum(1))))), residual


class _ByHand(nn.Module):
    """Embedding, layers and head in a class of the user's own."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCABULARY, WIDTH), layers, nn.Linear(WIDTH, VOCABULARY)

    def run(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> CausalLMOutput:
        logits = self.head(self.run(self.embed(input_ids) * attention_mask.unsqueeze(-1)))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss, logits=logits)


class _List(_ByHand):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x


class _Pairs(_ByHand):
    def run(self, x: Tensor) -> Tensor:
        residual = torch.zeros_like(x)
        for layer in self.layers:  # type: ignore[attr-defined]
            x, residual = layer(x, residual)
        return x + residual


def _family(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = T.AutoModelForCausalLM.from_config(configuration(name, NUM_LAYERS, use_cache=False, **options))
        return model.float().train()

    return build


def _checkpointed() -> nn.Module:
    model: Any = _family("llama")()
    model.gradient_checkpointing_enable()
    return model


def _encoder_decoder() -> nn.Module:
    sizes: dict[str, Any] = dict(d_model=WIDTH, d_kv=8, d_ff=48, num_layers=NUM_LAYERS, num_heads=4, dropout_rate=0.0)
    tokens: dict[str, Any] = dict(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    return T.T5ForConditionalGeneration(T.T5Config(**sizes, **tokens)).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.Sequential": lambda: _ByHand(nn.Sequential(*(_Block() for _ in range(NUM_LAYERS)))),
    "ModuleList": lambda: _List(nn.ModuleList(_Block() for _ in range(NUM_LAYERS))),
    "hidden + residual": lambda: _Pairs(nn.ModuleList(_Pair() for _ in range(NUM_LAYERS))),
    "llama": _family("llama"),
    "gemma3": _family("gemma3"),
    "mixtral": _family("mixtral", output_router_logits=True),
    "qwen3_moe": _family("qwen3_moe"),
    "deepseek_v2": _family("deepseek_v2"),
    "deepseek_v3": _family("deepseek_v3"),
    "mamba": _family("mamba"),
    "mamba2": _family("mamba2"),
    "jamba": _family("jamba", output_router_logits=True),
    "nemotron_h": _family("nemotron_h"),
    "bamba": _family("bamba"),
    "granitemoehybrid": _family("granitemoehybrid"),
    "falcon_h1": _family("falcon_h1"),
    "gpt2": _family("gpt2"),
    "zamba2": _family("zamba2"),
    "llama, checkpointed": _checkpointed,
    "t5 (encoder-decoder)": _encoder_decoder,
    "llama, deep supervision": _family("llama"),
}


def make(name: str, late: bool = False) -> L.LightningModule:
    """The LightningModule of a model; see `Trained`."""
    return (Supervised if "supervision" in name else Trained)(MODELS[name], late)


def batches(num: int) -> list[dict[str, Tensor]]:
    """Batches of two texts of random tokens, every second one padded on the left, of two lengths in turn."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for j in range(num):
        ids = torch.randint(3, VOCABULARY, (2, 12 if j % 4 < 2 else 9), generator=generator)
        mask, labels = torch.ones_like(ids), ids.clone()
        if j % 2:
            mask[1, : 2 + j % 3] = 0
            labels[mask == 0] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found
