"""Every field of a draft's config.json: its kind, its bounds, and what it is when absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MISSING: Final = object()
"""Marks a value that is absent, where null would be a value."""

LARGEST: Final = 2**31 - 1


@dataclass(frozen=True)
class Field:
    """One field. `default` is MISSING where the file must state it; `low` and `high` are inclusive."""

    name: str
    kind: str
    default: Any = MISSING
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def must(self) -> str:
        """What a value has to be, in words."""
        words = KINDS[self.kind]
        if self.choices:
            words += " out of " + ", ".join(self.choices)
        elif math.isfinite(self.high):
            words += f" between {self.low:g} and {self.high:,.0f}" if self.high >= 1 else f" up to {self.high:g}"
        return words

    def wrong(self, value: Any) -> str | None:
        """What was found, when `value` cannot stand here; None when it can. Never raises."""
        if value is MISSING:
            return "it is missing" if self.required else None
        if value is None and self.kind in NULLABLE:
            return None
        if not _is_kind(self.kind, value):
            return f"it is {describe(value)}"
        for item in value if self.kind in LISTS and isinstance(value, list) else [value]:
            if isinstance(item, float) and not math.isfinite(item):
                return f"it is {item}"
            if isinstance(item, int | float) and not isinstance(item, bool) and not self.low <= item <= self.high:
                return f"it is {describe(item)}"
        if self.choices and value not in self.choices:
            return f"it is {describe(value)}"
        return None


KINDS: Final[dict[str, str]] = {
    "int": "an integer",
    "number": "a number",
    "bool": "true or false",
    "string": "a string",
    "object": "an object",
    "ids": "a list of integers",
    "strings": "a list of strings",
    "token": "a token id",
    "tokens": "a token id or a list of them",
}
NULLABLE: Final = {"token", "tokens", "object", "strings"}
LISTS: Final = {"ids", "tokens"}


def _is_kind(kind: str, value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "int" | "token":
            return whole
        case "number":
            return whole or isinstance(value, float)
        case "bool":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "object":
            return isinstance(value, Mapping)
        case "tokens" if whole:
            return True
        case "ids" | "tokens":
            return (
                isinstance(value, list)
                and bool(value)
                and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
            )
        case _:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)


def describe(value: Any) -> str:
    """A value as it would stand in JSON, shortened; its type is said where that is the surprise."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) > 10**15:
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, str):
        return f'the string "{value[:40]}{"…" if len(value) > 40 else ""}"'
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        inside = ", ".join("…" if isinstance(v, list | Mapping) else describe(v) for v in value[:8])
        return f"[{inside}{', …' if len(value) > 8 else ''}]"
    return repr(value)


def _size(name: str, high: int = 2**24, default: Any = MISSING) -> Field:
    return Field(name, "int", default, 1, high)


FIELDS: Final[tuple[Field, ...]] = (
    Field("architectures", "strings", None),
    Field("model_type", "string", choices=("k3_dspark",)),
    _size("hidden_size"),
    _size("intermediate_size"),
    _size("num_hidden_layers", 1024),
    _size("num_attention_heads", 65536),
    _size("num_key_value_heads", 65536, None),
    _size("q_lora_rank"),
    _size("kv_lora_rank"),
    _size("qk_nope_head_dim", 65536),
    _size("qk_rope_head_dim", 65536),
    _size("v_head_dim", 65536),
    Field("mla_use_nope", "bool", False),
    Field("mla_use_output_gate", "bool", False),
    _size("vocab_size", 2**26),
    Field("rms_norm_eps", "number", MISSING, 1e-12, 0.1),
    _size("max_position_embeddings", LARGEST),
    Field("rope_theta", "number", None, 1.0, 1e15),
    _size("num_target_layers", 1024, None),
    _size("target_hidden_size"),
    _size("target_num_hidden_layers", 65536),
    Field("target_layer_ids", "ids", MISSING, 0, LARGEST),
    Field("mask_token_id", "int", MISSING, 0, LARGEST),
    Field("bos_token_id", "token", None, 0, LARGEST),
    Field("eos_token_id", "tokens", None, 0, LARGEST),
    Field("pad_token_id", "token", None, 0, LARGEST),
    _size("markov_rank"),
    Field("markov_head_type", "string", "vanilla", choices=("vanilla", "gated", "rnn")),
    Field("enable_confidence_head", "bool", True),
    Field("confidence_head_with_markov", "bool", True),
    Field("tie_word_embeddings", "bool", False),
    _size("draft_vocab_size", 2**26, None),
    Field("torch_dtype", "string", None, choices=("bfloat16", "float16", "float32")),
    Field("dtype", "string", None, choices=("bfloat16", "float16", "float32")),
    Field("rope_parameters", "object", None),
    # Switches that the published file leaves at their defaults (spec §A.10).
    Field("hidden_act", "string", "silu", choices=("silu",)),
    _size("block_size", 64, 7),
    Field("block_causal", "bool", False),
    Field("fc_norm", "bool", False),
    Field("aux_hidden_stream", "string", "prefix", choices=("prefix", "attn_res")),
    Field("sample_from_anchor", "bool", True),
    Field("share_target_embeddings", "bool", False),
    Field("rope_scaling", "object", None),
    Field("dflash_config", "object", None),
    Field("full_attention_causal", "bool", None),
)
BY_NAME: Final = {field.name: field for field in FIELDS}

ROPE_FIELDS: Final[tuple[Field, ...]] = (
    Field("rope_type", "string", "default", choices=("default", "yarn")),
    Field("rope_theta", "number", None, 1.0, 1e15),
    Field("factor", "number", None, 1.0, 1e6),
    _size("original_max_position_embeddings", LARGEST, None),
    Field("beta_fast", "number", None, 1e-3, 1e6),
    Field("beta_slow", "number", None, 1e-3, 1e6),
    Field("mscale", "number", None, 1e-6, 1e3),
    Field("mscale_all_dim", "number", None, 0.0, 1e3),
)


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """The effective value of a top-level field or `rope_parameters.X`: what the file states, else the default.

    Assumes well-kinded fields; `rules.evaluate` establishes that.
    """
    if name.startswith("rope_parameters."):
        return rope_parameters(config).get(name.partition(".")[2])
    match name:
        case "num_key_value_heads" | "draft_vocab_size" | "num_target_layers":
            value = config.get(name)
            return _twin(config, name) if value is None else value
        case "block_causal":
            return block_causal(config)
        case "torch_dtype":
            return config.get("torch_dtype") or config.get("dtype")
        case "rope_theta":
            return rope_parameters(config).get("rope_theta")
    value, field = config.get(name), BY_NAME[name]
    # null means absent: transformers writes it for what was never set
    return field.default if value is None and not field.required else value


def _twin(config: Mapping[str, Any], name: str) -> Any:
    if name == "num_target_layers":
        return len(config["target_layer_ids"])
    return config["num_attention_heads" if name == "num_key_value_heads" else "vocab_size"]


def stated_causality(config: Mapping[str, Any]) -> tuple[str, bool] | None:
    """(key, value) of whichever of the known causality keys the file uses, in the order engines read them."""
    if isinstance(config.get("block_causal"), bool):
        return "block_causal", config["block_causal"]
    inner = config.get("dflash_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("causal"), bool):
        return "dflash_config.causal", inner["causal"]
    if isinstance(config.get("full_attention_causal"), bool):
        return "full_attention_causal", config["full_attention_causal"]
    return None


def block_causal(config: Mapping[str, Any]) -> bool:
    """Whether block rows see only earlier rows of their block; bidirectional when nothing says (spec §A.5)."""
    stated = stated_causality(config)
    return stated[1] if stated is not None else False


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope block with `rope_type` and `rope_theta` filled in; older files call it `rope_scaling` with `type`."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(stated) if isinstance(stated, Mapping) else {}
    if "rope_type" not in parameters:
        parameters["rope_type"] = parameters.pop("type", "default")
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta")
    return parameters


def softmax_scale(config: Mapping[str, Any]) -> float:
    """σ_s = (d_n + d_r)^(−1/2) · m(mscale_all_dim)² (spec §A.6); 0.1308608 for the published config."""
    width = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
    rope = rope_parameters(config)
    return float(width**-0.5 * _mscale(rope, "mscale_all_dim") ** 2)


def rope_multiplier(config: Mapping[str, Any]) -> float:
    """μ of the cos/sin table: m(mscale) / m(mscale_all_dim); 1 for the published config."""
    rope = rope_parameters(config)
    return _mscale(rope, "mscale") / _mscale(rope, "mscale_all_dim")


def _mscale(rope: Mapping[str, Any], name: str) -> float:
    factor = float(rope.get("factor") or 1.0)
    if rope.get("rope_type") != "yarn" or factor <= 1.0:
        return 1.0
    return 0.1 * float(rope[name]) * math.log(factor) + 1.0
