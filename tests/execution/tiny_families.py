"""Tiny random causal language models of transformers' families, with every kind of layer in four layers."""

import torch
import transformers

WIDTH, VOCABULARY, NUM_LAYERS = 32, 64, 4
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
_LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
}
_MAMBA2 = {"mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def _without(drop, **values):
    return {name: value for name, value in values.items() if name != drop}


CONFIGURATIONS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": lambda: transformers.LlamaConfig(**_COMMON, **_ATTENTION, intermediate_size=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON, **_ATTENTION, head_dim=16, intermediate_size=64, sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, **_ATTENTION, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        sliding_window=None,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, **_ATTENTION, head_dim=16, intermediate_size=64, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=True,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**_COMMON, **_LATENT, topk_method="greedy"),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**_COMMON, **_LATENT, n_group=2, topk_group=1),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=NUM_LAYERS, state_size=8
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=NUM_LAYERS, state_size=8, head_dim=16, num_heads=4,
        n_groups=1, chunk_size=8, tie_word_embeddings=False,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_COMMON, **_ATTENTION, intermediate_size=64, num_experts=4, num_experts_per_tok=2, expert_layer_period=2,
        expert_layer_offset=1, attn_layer_period=4, attn_layer_offset=2, mamba_d_state=8, mamba_dt_rank=4,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_without("num_hidden_layers", **_COMMON), **_ATTENTION, head_dim=16,
        layers_block_type=["mamba", "moe", "attention", "mlp"], intermediate_size=64, ssm_state_size=8, mamba_num_heads=4,
        mamba_head_dim=16, n_groups=2, chunk_size=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **_COMMON, **_ATTENTION, **_MAMBA2, intermediate_size=64, attn_layer_indices=[2], num_logits_to_keep=0
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_COMMON, **_ATTENTION, **_MAMBA2, intermediate_size=32, shared_intermediate_size=32, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["mamba", "mamba", "attention", "mamba"], position_embedding_type="rope",
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **_COMMON, num_attention_heads=2, layers_block_type=["mamba", "hybrid", "hybrid", "hybrid"], num_mem_blocks=2,
        intermediate_size=64, mamba_d_state=8, n_mamba_heads=4, chunk_size=8, use_mem_rope=True,
        use_shared_attention_adapter=True, adapter_rank=8,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **_COMMON, **_ATTENTION, **_MAMBA2, mamba_d_ssm=64, intermediate_size=64
    ),
}  # fmt: skip


def build(family, experts=None):
    """A model of a family; experts is transformers' name of an experts implementation, None for its default."""
    torch.manual_seed(0)
    configuration = CONFIGURATIONS[family]()
    configuration.use_cache = False
    if experts is not None:
        configuration._experts_implementation = experts
    model = transformers.AutoModelForCausalLM.from_config(configuration).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and not parameter.any():
                parameter.normal_(0, 0.02)
    return model


def loss_of(model):
    """The loss on random tokens, and no input."""
    tokens = torch.randint(3, VOCABULARY, (2, 16))
    return model(input_ids=tokens, labels=tokens).loss, None
