"""Tiny random configurations of the Hugging Face causal language models that a pipeline is tried on."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import transformers as T

T.logging.set_verbosity_error()
VOCABULARY = 64
WIDTH = 32
Kinds = dict[str, tuple[Any, dict[str, Any]]]
COMMON: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, bos_token_id=1, eos_token_id=2, pad_token_id=None)
ATTENTION: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2)
NO_DROPOUT: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MAMBA2: dict[str, Any] = dict(mamba_d_state=8, mamba_d_head=8, mamba_n_heads=8, mamba_n_groups=1, mamba_chunk_size=8)


def _types(num_layers: int, *pattern: str) -> list[str]:
    return list(islice(cycle(pattern), num_layers))


def _mixtures_of_experts(dense: dict[str, Any], num_layers: int) -> Kinds:
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
            | {"layer_types": _types(num_layers, "mamba", "attention"), "position_embedding_type": "rope"}
            | {"embedding_multiplier": 2.0},
        ),
    }


def _state_spaces(dense: dict[str, Any], num_layers: int) -> Kinds:
    plain = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": num_layers, "state_size": 8}
    return {
        "mamba": (T.MambaConfig, plain),
        "mamba2": (
            T.Mamba2Config,
            {**plain, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8, "tie_word_embeddings": False},
        ),
        "jamba": (
            T.JambaConfig,
            {**dense, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
            | {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
        ),
        "falcon_h1": (T.FalconH1Config, {**dense, **MAMBA2, "mamba_d_ssm": 64}),
        "bamba": (T.BambaConfig, {**dense, **MAMBA2, "attn_layer_indices": list(range(1, num_layers, 2))}),
        "nemotron_h": (
            T.NemotronHConfig,
            {**COMMON, **ATTENTION, "head_dim": 8, "intermediate_size": 48}
            | {"layers_block_type": _types(num_layers, "mamba", "moe", "attention", "mlp")}
            | {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            | {"moe_shared_expert_intermediate_size": 32},
        ),
        "zamba2": (
            T.Zamba2Config,
            {**dense, "num_key_value_heads": 4, "layers_block_type": _types(num_layers, "mamba", "hybrid")}
            | {"num_mem_blocks": 1, "mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 8, "use_mem_rope": True},
        ),
    }


def configuration(family: str, num_layers: int = 4, **options: Any) -> T.PretrainedConfig:
    """A random-weight configuration of a family.

    Args:
        family: transformers' name of the model type.
        num_layers: layers of the stack; types of layers alternate through it.
        options: instead of the values chosen here.

    Raises:
        KeyError: the family is not known here.
    """
    dense = {**COMMON, "num_hidden_layers": num_layers, **ATTENTION, "intermediate_size": 48}
    sizes = dict(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=num_layers, n_head=4, n_positions=64)
    kinds: Kinds = {
        "gpt2": (T.GPT2Config, {**sizes, **NO_DROPOUT}),
        "llama": (T.LlamaConfig, dense),
        "gemma3": (
            T.Gemma3TextConfig,
            {**dense, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
            | {"layer_types": _types(num_layers, "sliding_attention", "full_attention")},
        ),
    }
    kinds |= _mixtures_of_experts(dense, num_layers) | _state_spaces(dense, num_layers)
    kind, values = kinds[family]
    return kind(**{**values, **options})
