"""One tiny random model for every kind of state that a transformers model keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from k3dspark.target.rollback import Rollback
from target.tiny import GEOMETRY, LAYERS, VOCABULARY, llama, qwen3

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # a random tied head repeats the last token for ever
}
ATTENTION: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 700,
}
LATENT: dict[str, Any] = {
    **ATTENTION,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}


def kimi_linear() -> transformers.PreTrainedConfig:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    mlp = ["dense", "sparse", "sparse"]
    return transformers.KimiLinearConfig(
        **{**LATENT, "q_lora_rank": None},
        layer_types=kinds,
        mlp_layer_types=mlp,
        linear_head_dim=8,
        linear_num_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def gemma3n() -> transformers.PreTrainedConfig:
    """Four residual streams side by side."""
    return transformers.Gemma3nTextConfig(
        **{**ATTENTION, "head_dim": 12, "num_hidden_layers": 2},
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 2,
        layer_types=["full_attention", "full_attention"],
    )


FAMILIES: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], Rollback]] = {
    "Llama": (llama, Rollback.CROP),
    "Qwen3": (qwen3, Rollback.CROP),
    "DeepSeek-V3": (lambda: transformers.DeepseekV3Config(**LATENT, first_k_dense_replace=1), Rollback.CROP),
    "DeepSeek-V3.2": (
        lambda: transformers.DeepseekV32Config(**LATENT, index_topk=9, index_head_dim=16, index_n_heads=16),
        Rollback.CROP,
    ),
    "Kimi-Linear": (kimi_linear, Rollback.REPLAY),
    "Mistral with a window": (lambda: transformers.MistralConfig(**{**GEOMETRY, "sliding_window": 7}), Rollback.CROP),
    "Gemma 3": (
        lambda: transformers.Gemma3TextConfig(
            **{**ATTENTION, "head_dim": 12},
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        Rollback.CROP,
    ),
    "Gemma 2": (
        lambda: transformers.Gemma2Config(
            **{**ATTENTION, "head_dim": 12},
            sliding_window=6,
        ),
        Rollback.CROP,
    ),
    "Llama 4": (
        lambda: transformers.Llama4TextConfig(
            **{**ATTENTION, "head_dim": 12},
            intermediate_size_mlp=44,
            attention_chunk_size=8,
            num_local_experts=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        ),
        Rollback.CROP,
    ),
    "gpt-oss": (
        lambda: transformers.GptOssConfig(
            **{**ATTENTION, "head_dim": 12},
            sliding_window=6,
            num_local_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
            eos_token_id=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        Rollback.CROP,
    ),
    "LFM2": (
        lambda: transformers.Lfm2Config(**GEOMETRY, layer_types=["conv", "full_attention", "conv"]),
        Rollback.CROP,
    ),
    "Qwen3-Next": (
        lambda: transformers.Qwen3NextConfig(
            **GEOMETRY,
            **DELTA_RULE,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        Rollback.REPLAY,
    ),
    "Qwen3.5": (
        lambda: transformers.Qwen3_5TextConfig(**ATTENTION, head_dim=12, **DELTA_RULE),
        Rollback.REPLAY,
    ),
    "OLMo hybrid": (
        lambda: transformers.OlmoHybridConfig(**ATTENTION, **DELTA_RULE, pad_token_id=0, eos_token_id=2),
        Rollback.REPLAY,
    ),
    "Mamba": (lambda: transformers.MambaConfig(**SMALL, state_size=4), Rollback.SNAPSHOT),
    "Falcon-Mamba": (lambda: transformers.FalconMambaConfig(**SMALL, state_size=4), Rollback.SNAPSHOT),
    "Mamba-2": (
        lambda: transformers.Mamba2Config(**SMALL, state_size=8, num_heads=6, head_dim=16, n_groups=2, chunk_size=4),
        Rollback.REPLAY,
    ),
    "Jamba": (
        lambda: transformers.JambaConfig(
            **ATTENTION,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=3,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        Rollback.SNAPSHOT,
    ),
    "Bamba": (
        lambda: transformers.BambaConfig(**ATTENTION, **MAMBA2, attn_layer_indices=[1]),
        Rollback.REPLAY,
    ),
    "Granite 4": (
        lambda: transformers.GraniteMoeHybridConfig(
            **ATTENTION,
            **MAMBA2,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=0,
            shared_intermediate_size=44,
        ),
        Rollback.REPLAY,
    ),
    "Nemotron-H": (
        lambda: transformers.NemotronHConfig(
            **ATTENTION,
            layers_block_type=["mamba", "attention", "mamba"],
            mamba_num_heads=4,
            mamba_head_dim=24,
            n_groups=1,
            ssm_state_size=8,
            chunk_size=4,
        ),
        Rollback.REPLAY,
    ),
    "Zamba2": (
        lambda: transformers.Zamba2Config(
            **{**ATTENTION, "num_key_value_heads": 4},
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=4,
            chunk_size=4,
            use_mem_rope=True,
            adapter_rank=4,
            layers_block_type=["mamba", "hybrid", "mamba"],
        ),
        Rollback.REPLAY,
    ),
    "Falcon-H1": (
        lambda: transformers.FalconH1Config(**ATTENTION, **{**MAMBA2, "mamba_d_head": 8, "mamba_d_ssm": 32}),
        Rollback.REPLAY,
    ),
    "RWKV": (lambda: transformers.RwkvConfig(**SMALL), Rollback.RECOMPUTE),
    "RecurrentGemma": (
        lambda: transformers.RecurrentGemmaConfig(
            **ATTENTION, lru_width=48, attention_window_size=6, block_types=["recurrent", "recurrent", "attention"]
        ),
        Rollback.RECOMPUTE,
    ),
    "MiniMax": (
        lambda: transformers.MiniMaxConfig(
            **{**ATTENTION, "head_dim": 12},
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=4,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        Rollback.RECOMPUTE,
    ),
}
