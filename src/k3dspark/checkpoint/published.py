"""The config of the published five-layer K3 MLA draft, as its config.json states it (spec §G.2), and a miniature."""

from __future__ import annotations

from typing import Any


def published_config() -> dict[str, Any]:
    """A fresh copy, in the order of the published file."""
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576,
        "rope_theta": 50000.0,
        "num_target_layers": 5,
        "target_hidden_size": 7168,
        "target_num_hidden_layers": 93,
        "target_layer_ids": [2, 23, 47, 71, 89],
        "mask_token_id": 163837,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "draft_vocab_size": 163840,
        "_torchspec_version": "0.1.0",
        "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def tiny_config() -> dict[str, Any]:
    """The published layout in miniature, 68 tensors of some 75,000 parameters, for tests and rehearsals."""
    config = published_config()
    config.update(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        vocab_size=320,
        draft_vocab_size=320,
        max_position_embeddings=2048,
        target_hidden_size=32,
        target_num_hidden_layers=8,
        target_layer_ids=[0, 2, 3, 5, 6],
        mask_token_id=317,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=319,
        markov_rank=8,
        # Transformers' tiny targets are fp32, and CPU tests compare to 1e-5.
        torch_dtype="float32",
    )
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    return config
