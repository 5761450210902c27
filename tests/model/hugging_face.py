"""Tiny random Hugging Face causal language models inside a LightningModule, as users write it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import transformers as T
from torch import Tensor

T.logging.set_verbosity_error()
VOCABULARY = 64
Kinds = dict[str, tuple[Any, dict[str, Any]]]
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=None)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MAMBA2 = dict(mamba_d_state=8, mamba_d_head=8, mamba_n_heads=8, mamba_n_groups=1, mamba_chunk_size=8)


def mixtures_of_experts(dense: dict[str, Any]) -> Kinds:
    """The other families with experts."""
    latent = {**dense, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    latent |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4}
    latent |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return {
        "mixtral": (T.MixtralConfig, {**dense, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "qwen3_moe": (
            T.Qwen3MoeConfig,
            {**dense, "head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
            | {"decoder_sparse_step": 2, "mlp_only_layers": [], "output_router_logits": True, "norm_topk_prob": True},
        ),
        "deepseek_v2": (T.DeepseekV2Config, {**latent, "topk_method": "greedy"}),
        "deepseek_v3": (T.DeepseekV3Config, {**latent, "n_group": 2, "topk_group": 1}),
        "granitemoehybrid": (
            T.GraniteMoeHybridConfig,
            {**dense, **MAMBA2, **experts, "intermediate_size": 32, "shared_intermediate_size": 32}
            | {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope", "embedding_multiplier": 2.0},
        ),
    }


def state_spaces(common: dict[str, Any], dense: dict[str, Any]) -> Kinds:
    """The other families with state-space layers."""
    return {
        "mamba": (T.MambaConfig, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}),
        "mamba2": (
            T.Mamba2Config,
            {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8, "head_dim": 8}
            | {"num_heads": 8, "n_groups": 1, "chunk_size": 8, "tie_word_embeddings": False},
        ),
        "jamba": (
            T.JambaConfig,
            {**dense, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
            | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
        ),
        "falcon_h1": (T.FalconH1Config, {**dense, **MAMBA2, "mamba_d_ssm": 64}),
    }


def config(name: str, **options: Any) -> T.PretrainedConfig:
    """A configuration of four layers (nemotron_h: five)."""
    common = {**COMMON, "num_hidden_layers": 4}
    dense = {**common, **ATTENTION, "intermediate_size": 48}
    kinds: Kinds = {
        "gpt2": (
            T.GPT2Config,
            dict(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, **NO_DROPOUT),
        ),
        "llama": (T.LlamaConfig, dense),
        "gemma3": (
            T.Gemma3TextConfig,
            {
                **dense,
                "head_dim": 8,
                "sliding_window": 4,
                "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        "bamba": (T.BambaConfig, {**dense, **MAMBA2, "attn_layer_indices": [1, 3]}),
        "zamba2": (
            T.Zamba2Config,
            {
                **dense,
                "num_key_value_heads": 4,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "num_mem_blocks": 1,
                "mamba_d_state": 8,
                "n_mamba_heads": 8,
                "chunk_size": 8,
                "use_mem_rope": True,
            },
        ),
        "nemotron_h": (
            T.NemotronHConfig,
            {
                **COMMON,
                **ATTENTION,
                "head_dim": 8,
                "intermediate_size": 48,
                "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
                "ssm_state_size": 8,
                "mamba_num_heads": 8,
                "mamba_head_dim": 8,
                "n_groups": 2,
                "chunk_size": 8,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 32,
            },
        ),
    }
    kinds |= mixtures_of_experts(dense) | state_spaces(common, dense)
    kind, values = kinds[name]
    return kind(**{**values, **options})


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
