"""Kimi K3's config.json and the tensors it asks for, under their published names (spec §H.1).

No weights are needed to know them, so a directory of Kimi K3 can be recognised and its index checked anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from k3dspark.errors import BadInput

PREFIX: Final = "language_model."
DECAY_STORAGE: Final = 128  # A_log is stored in multiples of so many numbers; those beyond the heads are zeros
FP4_GROUP: Final = 32  # numbers of a quantised matrix that share a scale
_AGAIN: Final = "use config.json as it was published with the model"


@dataclass(frozen=True)
class KimiK3Shape:
    """Dimensions and switches of the text model, as config.json states them."""

    hidden_size: int
    vocab_size: int
    layers: int
    max_positions: int
    eps: float
    kda_layers: frozenset[int]  # 0-based; all others are MLA
    block_size: int  # layers of an attention-residual block
    # MLA
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    # KDA
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    # MLP
    dense_layers: int  # so many first layers have a dense MLP
    intermediate_size: int
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_size: int
    latent_size: int
    latent_norm: bool
    renormalize: bool
    routed_scale: float
    situ_beta: float
    situ_linear_beta: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KimiK3Shape:
        """From config.json, whose text model may lie under `text_config`.

        Raises `BadInput` for what is missing, contradicts itself, or is not the published architecture.
        """
        inner = config.get("text_config")
        text = inner if isinstance(inner, Mapping) else config
        linear = text.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise _unusable("linear_attn_config", linear, "it says which layers are KDA")
        layers = _size(text, "num_hidden_layers")
        _require_published(text)
        experts, chosen = _size(text, "num_experts"), _size(text, "num_experts_per_token", "num_experts_per_tok")
        if chosen > experts:
            raise _unusable("num_experts_per_token", chosen, f"there are {experts} experts")
        return cls(
            hidden_size=_size(text, "hidden_size"),
            vocab_size=_size(text, "vocab_size"),
            layers=layers,
            max_positions=_size(text, "max_position_embeddings", "model_max_length"),
            eps=_number(text, "rms_norm_eps"),
            kda_layers=_kda_layers(linear, layers),
            block_size=_size(text, "attn_res_block_size"),
            heads=_size(text, "num_attention_heads"),
            q_lora_rank=_size(text, "q_lora_rank"),
            kv_lora_rank=_size(text, "kv_lora_rank"),
            qk_nope_head_dim=_size(text, "qk_nope_head_dim"),
            qk_rope_head_dim=_size(text, "qk_rope_head_dim"),
            v_head_dim=_size(text, "v_head_dim"),
            output_gate=bool(text.get("mla_use_output_gate", False)),
            kda_heads=_size(linear, "num_heads"),
            kda_head_dim=_size(linear, "head_dim"),
            conv_kernel=_size(linear, "short_conv_kernel_size"),
            gate_lower_bound=_bound(linear),
            full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
            dense_layers=int(text.get("first_k_dense_replace", 0)),
            intermediate_size=_size(text, "intermediate_size"),
            experts=experts,
            experts_per_token=chosen,
            shared_experts=_size(text, "num_shared_experts"),
            expert_size=_size(text, "moe_intermediate_size"),
            latent_size=_size(text, "routed_expert_hidden_size"),
            latent_norm=bool(text.get("latent_moe_use_norm", False)),
            renormalize=bool(text.get("moe_renormalize", True)),
            routed_scale=_number(text, "routed_scaling_factor"),
            situ_beta=_number(text, "activation_situ_beta"),
            situ_linear_beta=_number(text, "activation_situ_linear_beta"),
        )

    @property
    def kda_width(self) -> int:
        """Channels of the KDA heads together."""
        return self.kda_heads * self.kda_head_dim

    @property
    def row_width(self) -> int:
        """Numbers that an MLA layer keeps for a token: the latent and the shared part of the keys."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.layers) if layer not in self.kda_layers)


def is_kimi_k3(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of Kimi K3: Kimi-Linear layers joined by attention residuals."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    return config.get("model_type") == "kimi_k3" or (
        text.get("model_type") in ("kimi_k3", "kimi_linear") and text.get("attn_res_block_size") is not None
    )


def kimi_k3_tensors(shape: KimiK3Shape) -> dict[str, tuple[int, ...]]:
    """Published name → shape of every matrix and vector of the text model; 2,460 of them are not experts' at full size.

    An expert's matrix may instead be stored quantised, as `weight_packed` and `weight_scale` (`packed_names`).
    """
    d, vocabulary = shape.hidden_size, shape.vocab_size
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, d),
        "model.norm.weight": (d,),
        "model.output_attn_res_norm.weight": (d,),
        "model.output_attn_res_proj.weight": (1, d),
        "lm_head.weight": (vocabulary, d),
    }
    for layer in range(shape.layers):
        tensors |= {f"model.layers.{layer}.{name}": size for name, size in _layer(shape, layer)}
    return {PREFIX + name: size for name, size in tensors.items()}


def packed_names(name: str) -> tuple[str, str]:
    """Where a quantised matrix lies: its 4-bit numbers, two in a byte, and its scales."""
    return f"{name}_packed", f"{name}_scale"


def _layer(shape: KimiK3Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = shape.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield f"{norm}.weight", (d,)
    for projection in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{projection}.weight", (1, d)
    attention = _kda(shape) if layer in shape.kda_layers else _mla(shape)
    yield from ((f"self_attn.{name}", size) for name, size in attention)
    if layer < shape.dense_layers:
        yield from ((f"mlp.{name}", size) for name, size in _mlp(d, shape.intermediate_size))
        return
    shared = shape.shared_experts * shape.expert_size
    for name, size in _moe(shape):
        yield f"block_sparse_moe.{name}", size
    yield from ((f"block_sparse_moe.shared_experts.{name}", size) for name, size in _mlp(d, shared))


def _kda(shape: KimiK3Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, width, head = shape.hidden_size, shape.kda_width, shape.kda_head_dim
    for name in "qkv":
        yield f"{name}_proj.weight", (width, d)
        yield f"{name}_conv1d.weight", (width, 1, shape.conv_kernel)
    yield "f_a_proj.weight", (head, d)
    yield "f_b_proj.weight", (width, head)
    yield "b_proj.weight", (shape.kda_heads, d)
    yield "A_log", (-(-shape.kda_heads // DECAY_STORAGE) * DECAY_STORAGE,)
    yield "dt_bias", (width,)
    if shape.full_rank_gate:
        yield "g_proj.weight", (width, d)
    else:
        yield "g_a_proj.weight", (head, d)
        yield "g_b_proj.weight", (width, head)
    yield "o_norm.weight", (head,)
    yield "o_proj.weight", (d, width)


def _mla(shape: KimiK3Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, values = shape.hidden_size, shape.heads * shape.v_head_dim
    yield "q_a_proj.weight", (shape.q_lora_rank, d)
    yield "q_a_layernorm.weight", (shape.q_lora_rank,)
    yield "q_b_proj.weight", (shape.heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim), shape.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (shape.row_width, d)
    yield "kv_a_layernorm.weight", (shape.kv_lora_rank,)
    yield "kv_b_proj.weight", (shape.heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
    if shape.output_gate:
        yield "g_proj.weight", (values, d)
    yield "o_proj.weight", (d, values)


def _moe(shape: KimiK3Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, latent, inner = shape.hidden_size, shape.latent_size, shape.expert_size
    yield "gate.weight", (shape.experts, d)
    yield "gate.e_score_correction_bias", (shape.experts,)
    yield "routed_expert_down_proj.weight", (latent, d)
    yield "routed_expert_up_proj.weight", (d, latent)
    if shape.latent_norm:
        yield "routed_expert_norm.weight", (latent,)
    for expert in range(shape.experts):
        yield f"experts.{expert}.w1.weight", (inner, latent)  # gate
        yield f"experts.{expert}.w3.weight", (inner, latent)  # up
        yield f"experts.{expert}.w2.weight", (latent, inner)  # down


def _mlp(width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj.weight", (inner, width)
    yield "up_proj.weight", (inner, width)
    yield "down_proj.weight", (width, inner)


def _require_published(text: Mapping[str, Any]) -> None:
    """The switches whose other positions are other architectures."""
    wanted = {
        "hidden_act": ("situ",),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid", None),
        "num_expert_group": (1, None),
        "topk_group": (1, None),
        "moe_layer_freq": (1, None),
        "tie_word_embeddings": (False, None),
        "num_nextn_predict_layers": (0, None),
    }
    for name, allowed in wanted.items():
        if text.get(name) not in allowed:
            raise _unusable(name, text.get(name), f"Kimi K3 was published with {allowed[0]!r}")


def _kda_layers(linear: Mapping[str, Any], layers: int) -> frozenset[int]:
    """0-based, from lists that count from 1 and must name every layer once."""
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    if not isinstance(kda, list) or not isinstance(full, list):
        kda, full = [], []
    named = [*kda, *full]
    if len(named) != layers or set(map(repr, named)) != {str(layer) for layer in range(1, layers + 1)}:
        raise _unusable(
            "linear_attn_config",
            {"kda_layers": kda, "full_attn_layers": full},
            f"its two lists must name each of the layers 1 to {layers} once",
        )
    return frozenset(layer - 1 for layer in kda)


def _bound(linear: Mapping[str, Any]) -> float | None:
    return None if linear.get("gate_lower_bound") is None else _number(linear, "gate_lower_bound")


def _size(mapping: Mapping[str, Any], *names: str) -> int:
    value = next((mapping[name] for name in names if mapping.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unusable(names[0], value, "a positive whole number is needed")
    return value


def _number(mapping: Mapping[str, Any], name: str) -> float:
    value = mapping.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _unusable(name, value, "a number is needed")
    return float(value)


def _unusable(name: str, value: object, why: str) -> BadInput:
    return BadInput(f"config.json of a Kimi K3 has {name} {str(value)[:200]}", why, _AGAIN)
