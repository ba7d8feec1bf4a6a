"""Which tensors a draft's config asks for: names, shapes, dtypes, file order, header and file sizes (spec §J)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from k3dspark.checkpoint.fields import value_of
from k3dspark.checkpoint.header import BITS

DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
LM_HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "embed_tokens.weight"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to expect. `terms` says, for each dimension, which config fields it comes from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    terms: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.parameters * BITS[self.dtype] // 8

    @property
    def fields(self) -> frozenset[str]:
        """Config fields that the shape depends on."""
        return frozenset(word for term in self.terms for word in re.findall(r"[a-z][a-z_]+", term))


def expected_tensors(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors of model.safetensors by canonical name (family A), in file order.

    `config` must satisfy `rules.require`. The published config gives 68 tensors and 3,562,312,961 parameters.
    """
    dtype = DTYPES[value_of(config, "torch_dtype") or "bfloat16"]
    sizes = Sizes(config)
    specs = [
        TensorSpec(name, "I64" if name == "d2t" else dtype, tuple(map(sizes, terms)), terms)
        for name, terms in _tensors(config)
    ]
    return {spec.name: spec for spec in file_order(specs)}


def lm_head_tensor(config: Mapping[str, Any]) -> TensorSpec:
    """The one tensor of lm_head.safetensors."""
    terms = ("vocab_size", "hidden_size")
    dtype = DTYPES[value_of(config, "torch_dtype") or "bfloat16"]
    return TensorSpec(LM_HEAD, dtype, (config["vocab_size"], config["hidden_size"]), terms)


class Sizes:
    """A term such as `num_attention_heads*v_head_dim` → its value in this config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, term: str) -> int:
        return sum(math.prod(map(self._factor, part.split("*"))) for part in term.split("+"))

    def _factor(self, word: str) -> int:
        return int(word) if word.isdigit() else int(value_of(self._config, word))


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    d = "hidden_size"
    yield "context_norm.weight", (d,)
    yield "context_proj.weight", (d, "num_target_layers*target_hidden_size")
    yield "final_norm.weight", (d,)
    if not value_of(config, "share_target_embeddings"):
        yield EMBEDDING, ("vocab_size", d)
    if value_of(config, "fc_norm"):
        for tap in range(value_of(config, "num_target_layers")):
            yield f"fc_norm.{tap}.weight", ("target_hidden_size",)
    for layer in range(config["num_hidden_layers"]):
        for name, terms in _LAYER.items():
            yield f"layers.{layer}.{name}.weight", terms
    r = "markov_rank"
    yield "markov_head.markov_w1.weight", ("vocab_size", r)
    yield "markov_head.markov_w2.weight", ("draft_vocab_size", r)
    match value_of(config, "markov_head_type"):
        case "gated":
            yield "markov_head.gate_proj.weight", (r, f"{d}+{r}")
            yield "markov_head.gate_proj.bias", (r,)
        case "rnn":
            yield "markov_head.joint_proj.weight", (f"3*{r}", f"2*{r}+{d}")
            yield "markov_head.joint_proj.bias", (f"3*{r}",)
    if value_of(config, "enable_confidence_head"):
        features = f"{d}+{r}" if value_of(config, "confidence_head_with_markov") else d
        yield "confidence_head.proj.weight", ("1", features)
        yield "confidence_head.proj.bias", ("1",)
    if value_of(config, "draft_vocab_size") < config["vocab_size"]:
        yield "d2t", ("draft_vocab_size",)


_LAYER: Final = {
    "input_layernorm": ("hidden_size",),
    "mlp.down_proj": ("hidden_size", "intermediate_size"),
    "mlp.gate_proj": ("intermediate_size", "hidden_size"),
    "mlp.up_proj": ("intermediate_size", "hidden_size"),
    "post_attention_layernorm": ("hidden_size",),
    "self_attn.kv_a_layernorm": ("kv_lora_rank",),
    "self_attn.kv_a_proj_with_mqa": ("kv_lora_rank+qk_rope_head_dim", "hidden_size"),
    "self_attn.kv_b_proj": ("num_attention_heads*qk_nope_head_dim+num_attention_heads*v_head_dim", "kv_lora_rank"),
    "self_attn.o_proj": ("hidden_size", "num_attention_heads*v_head_dim"),
    "self_attn.q_a_layernorm": ("q_lora_rank",),
    "self_attn.q_a_proj": ("q_lora_rank", "hidden_size"),
    "self_attn.q_b_proj": (
        "num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim",
        "q_lora_rank",
    ),
}

# DeepSpec's and NeMo's names (family B) for three tensors of family A (spec §J.3).
_FAMILY_B: Final = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
_PREFIXES: Final = ("draft_model.model.", "draft_model.", "model.")


def canonical_name(name: str) -> str:
    """A stored tensor name without an optional prefix and in the names of family A."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return _FAMILY_B.get(name, name)


# safetensors sorts by dtype first, widest first, then by name.
_FILE_RANK: Final = {"I64": 0, "F32": 1, "BF16": 2, "F16": 3}


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Specs as the safetensors library orders them in a file."""
    return sorted(specs, key=lambda spec: (_FILE_RANK[spec.dtype], spec.name))


def header_json(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header that the safetensors library writes for these tensors in this order, padded to 8 (spec §J.2)."""
    mapping: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for spec in specs:
        mapping[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.bytes],
        }
        position += spec.bytes
    text = json.dumps(mapping, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def file_bytes(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """Size of the safetensors file of these tensors; 7,124,633,402 for the published draft."""
    specs = list(specs)
    return 8 + len(header_json(specs, metadata)) + sum(spec.bytes for spec in specs)
