"""Kimi K3's config.json as published, and the pair in miniature: all 93 layers in their places, 64 wide."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from k3dspark.checkpoint.inventory import TensorSpec, file_order
from k3dspark.checkpoint.kimi_k3 import PREFIX, KimiK3Shape, kimi_k3_tensors
from k3dspark.checkpoint.published import published_config, tiny_config

if TYPE_CHECKING:
    import numpy as np

LAYERS: Final = 93
HEAD: Final = f"{PREFIX}lm_head.weight"
SHARDS: Final = 3
_FP32: Final = ("A_log", "dt_bias", "e_score_correction_bias")


def published_kimi_k3_config() -> dict[str, Any]:
    """The text model of Kimi K3 as its config.json states it (spec §H.1); the vision tower is left out."""
    full = [*range(4, LAYERS, 4), LAYERS]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["KimiK3ForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": 7168,
            "vocab_size": 163840,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 12,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
                "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in full],
                "full_attn_layers": full,
            },
            "intermediate_size": 33792,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "routed_scaling_factor": 1.0,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
            "pad_token_id": 163839,
            "torch_dtype": "bfloat16",
        },
    }


def mini_kimi_k3_config() -> dict[str, Any]:
    """The published architecture with every layer and switch, at a width that any machine runs."""
    config, tiny = published_kimi_k3_config(), tiny_config()
    text = config["text_config"]
    text.update(
        hidden_size=64,
        vocab_size=tiny["vocab_size"],
        max_position_embeddings=tiny["max_position_embeddings"],
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=12,
        intermediate_size=128,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        bos_token_id=tiny["bos_token_id"],
        eos_token_id=tiny["eos_token_id"],
        pad_token_id=tiny["pad_token_id"],
        torch_dtype="float32",
    )
    text["linear_attn_config"].update(num_heads=4, head_dim=16)
    return config


def mini_draft_config(stream: str = "prefix") -> dict[str, Any]:
    """The published draft's config for the miniature: its layers, taps and block, the miniature's width."""
    config, published = tiny_config(), published_config()
    config.update(
        hidden_size=64,
        intermediate_size=128,
        target_hidden_size=64,
        target_num_hidden_layers=published["target_num_hidden_layers"],
        target_layer_ids=published["target_layer_ids"],
    )
    if stream != "prefix":  # the published file has no such key
        config["aux_hidden_stream"] = stream
    return config


def mini_kimi_k3_shards() -> dict[str, list[TensorSpec]]:
    """File name → tensors, in file order, cut by layers as large models are."""
    shape = KimiK3Shape.from_config(mini_kimi_k3_config())
    shards: dict[str, list[TensorSpec]] = {
        f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors": [] for number in range(SHARDS)
    }
    files = list(shards)
    for name, size in kimi_k3_tensors(shape).items():
        place = int(name.split(".")[3]) * SHARDS // shape.layers if ".layers." in name else 0
        shards[files[-1 if name == HEAD else place]].append(TensorSpec(name, "F32", size, ()))
    return {file: file_order(specs) for file, specs in shards.items()}


def mini_blocks(spec: TensorSpec, seed: int) -> Iterator[np.ndarray[Any, Any]]:
    """Content of a tensor of the miniature: random, in ranges where every part of the model has a say.

    Matrices are N(0, 1/inputs), so that no layer's output drowns in another's. Decays remember for some tens of
    tokens; scores of experts differ by more than their correction biases do.
    """
    import numpy as np

    generator = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    kind = spec.name.removesuffix(".weight").rpartition(".")[2]
    if kind in _FP32:
        low, high = {"A_log": (0.0, math.log(4.0)), "dt_bias": (-4.0, -1.0)}.get(kind, (-0.1, 0.1))
        values = generator.uniform(low, high, spec.parameters)
    elif kind.endswith("norm"):
        values = generator.uniform(0.8, 1.2, spec.parameters)
    else:
        values = generator.standard_normal(spec.parameters) * spec.shape[-1] ** -0.5
    yield values.astype("<f4")


def index_of(shards: dict[str, list[TensorSpec]]) -> dict[str, Any]:
    """model.safetensors.index.json of these shards."""
    return {
        "metadata": {"total_size": sum(spec.bytes for specs in shards.values() for spec in specs)},
        "weight_map": {spec.name: file for file, specs in shards.items() for spec in specs},
    }
