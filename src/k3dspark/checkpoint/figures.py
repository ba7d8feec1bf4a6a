"""Figures that follow from a config: sizes, bytes per token, scales. Computed, never quoted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3dspark.checkpoint.fields import rope_multiplier, rope_parameters, softmax_scale, value_of
from k3dspark.checkpoint.header import BITS
from k3dspark.checkpoint.inventory import DTYPES, EMBEDDING, expected_tensors, file_bytes, lm_head_tensor


@dataclass(frozen=True)
class Figure:
    """One figure: a stable name, its value, and the arithmetic with this config's numbers in it."""

    name: str
    value: float
    unit: str
    arithmetic: str


def figures(config: Mapping[str, Any]) -> list[Figure]:
    """Every figure of a config that satisfies `rules.require`, in the order a report shows them."""
    return [*_weights(config), *_memory(config), *_attention(config)]


def _weights(config: Mapping[str, Any]) -> list[Figure]:
    specs, head = expected_tensors(config), lm_head_tensor(config)
    parameters = sum(spec.parameters for spec in specs.values())
    data = sum(spec.bytes for spec in specs.values())
    whole = list(specs.values())
    each = BITS[head.dtype] // 8
    rows, width = head.shape
    own = parameters - (specs[EMBEDDING].parameters if EMBEDDING in specs else 0)
    head_file = file_bytes([head])
    return [
        Figure("parameters", parameters, "", f"{len(specs)} tensors"),
        Figure("parameters_without_embedding", own, "", f"{parameters} − {rows} × {width}"),
        Figure(
            "model_file_bytes",
            file_bytes(whole),
            "B",
            f"8 + header {file_bytes(whole) - 8 - data} + data {data}",
        ),
        Figure("lm_head_file_bytes", head_file, "B", f"{rows} × {width} × {each} + {head_file - head.bytes}"),
        Figure("weights_bytes", data + head.bytes, "B", f"{data} + {head.bytes}"),
    ]


def _memory(config: Mapping[str, Any]) -> list[Figure]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    each = BITS[DTYPES[value_of(config, "torch_dtype") or "bfloat16"]] // 8
    context, taps = config["max_position_embeddings"], value_of(config, "num_target_layers")
    mla, full = layers * (latent + rope) * each, layers * heads * (key + value) * each
    hidden = taps * config["target_hidden_size"] * each
    rows = value_of(config, "block_size") + 1
    draft_vocabulary, rank = value_of(config, "draft_vocab_size"), config["markov_rank"]
    return [
        Figure("kv_bytes_per_token", mla, "B", f"{layers} × ({latent} + {rope}) × {each}"),
        Figure(
            "kv_bytes_per_token_without_mla",
            full,
            "B",
            f"{layers} × {heads} × ({key} + {value}) × {each}",
        ),
        Figure("kv_saving", full / mla, "×", f"{full} / {mla}"),
        Figure("kv_bytes_at_full_context", mla * context, "B", f"{mla} × {context}"),
        Figure(
            "hidden_bytes_per_verified_token",
            hidden,
            "B",
            f"{taps} × {config['target_hidden_size']} × {each}",
        ),
        Figure("hidden_bytes_per_round", hidden * rows, "B", f"{hidden} × (block_size + 1)"),
        Figure("markov_bytes_per_step", draft_vocabulary * rank * each, "B", f"{draft_vocabulary} × {rank} × {each}"),
    ]


def _attention(config: Mapping[str, Any]) -> list[Figure]:
    rope = rope_parameters(config)
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    figures = [
        Figure("softmax_scale", softmax_scale(config), "", f"{width}^(−1/2) × m²"),
        Figure("rope_multiplier", rope_multiplier(config), "", "m(mscale) / m(mscale_all_dim)"),
    ]
    if rope["rope_type"] == "yarn":
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        figures.append(Figure("context_window", round(original * factor), "tokens", f"{original} × {factor:g}"))
    return figures
