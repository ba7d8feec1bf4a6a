"""Weights of a Llama-family model, read once from safetensors and fused for a lean forward."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from k3dspark.errors import BadInput

FAMILIES = {"llama", "qwen2", "qwen3"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDEX = "model.safetensors.index.json"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama-family decoder, read from a transformers config.json."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    inv_freq: tuple[float, ...]
    rope_multiplier: float
    tied: bool
    model_type: str

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaShape:
        """Raises `BadInput` when the config is of another family or uses a feature the lean forward lacks."""
        reason = unsupported_reason(config)
        if reason is not None:
            raise BadInput("this model cannot run in the lean forward", reason, "load it through transformers instead")
        sizes = {name: _size(config, name) for name in SIZES}
        heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads or head_dim % 2:
            raise BadInput(
                f"config.json has {heads} heads, {kv_heads} key-value heads and head_dim {head_dim}",
                "the heads must be a multiple of the key-value heads, head_dim must be even",
                "fetch config.json again",
            )
        try:
            inv_freq, multiplier = _rope(config, head_dim)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise BadInput(
                "config.json describes no usable rotary embedding", f"{error!r}", "fetch config.json again"
            ) from error
        return cls(
            hidden_size=hidden,
            intermediate_size=sizes["intermediate_size"],
            layers=sizes["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=sizes["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=sizes["max_position_embeddings"],
            inv_freq=inv_freq,
            rope_multiplier=multiplier,
            tied=bool(config.get("tie_word_embeddings", False)),
            model_type=config["model_type"],
        )


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(
            f"config.json has no usable {name}", f"a positive whole number is needed, found {value!r}", "fetch it again"
        )
    return value


def unsupported_reason(config: dict[str, Any]) -> str | None:
    """Why the lean forward cannot run this config, or None when it can."""
    if config.get("model_type") not in FAMILIES:
        return f"model_type is {config.get('model_type')!r}; the lean forward knows {', '.join(sorted(FAMILIES))}"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {config['hidden_act']!r}, not silu"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        return "the model uses sliding-window attention"
    if config.get("mlp_bias"):
        return "the MLP has biases"
    if config.get("quantization_config"):
        return "the weights are quantised"
    rope = _rope_parameters(config)
    if rope["rope_type"] not in ("default", "llama3", "linear"):
        return f"rope_type is {rope['rope_type']!r}"
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        return "only a part of each head is rotated"
    return None


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    legacy = config.get("rope_scaling") or {}
    parameters = dict(config.get("rope_parameters") or legacy)
    parameters.setdefault("rope_type", legacy.get("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return parameters


def _rope(config: dict[str, Any], head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters = _rope_parameters(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (parameters["rope_theta"] ** exponents)  # [head_dim / 2]
    if parameters["rope_type"] == "linear":
        inv_freq = inv_freq / parameters["factor"]
    elif parameters["rope_type"] == "llama3":
        # Llama 3.1: long wavelengths are divided by the factor, short ones kept, blended between.
        original = parameters["original_max_position_embeddings"]
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        wavelength = 2 * math.pi / inv_freq
        blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        inv_freq = inv_freq * (blend + (1 - blend) / parameters["factor"])
    return tuple(inv_freq.tolist()), 1.0


@dataclass(frozen=True)
class LlamaLayer:
    """One decoder layer; projections that read the same input are fused. Matrices are [out, in]."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True)
class LlamaWeights:
    """All tensors of a Llama-family model in one dtype."""

    shape: LlamaShape
    embed: torch.Tensor  # [V, d]
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]; the embedding itself when tied


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises `BadInput` naming what is missing or malformed."""
    path = directory / "config.json"
    if not path.is_file():
        raise BadInput(
            f"no config.json in {directory}", "a model directory holds config.json beside its weights", "check the path"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} is not valid JSON", str(error), "fetch the file again") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} is not a JSON object", f"found {type(config).__name__}", "fetch the file again")
    return config


def load_llama(directory: Path, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    """Read a Llama-family directory (single or sharded safetensors).

    Raises `BadInput` on a missing, misshapen, quantised or unreadable tensor.
    """
    config = read_config(directory)
    shape = LlamaShape.from_config(config)
    tensors = _TensorFiles(directory, dtype)
    d, attention, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"q": attention, "k": kv, "v": kv}
    qkv_biased = shape.model_type == "qwen2" or bool(config.get("attention_bias"))
    out_biased = shape.model_type != "qwen2" and bool(config.get("attention_bias"))
    layers = []
    for index in range(shape.layers):

        def get(name: str, *size: int, prefix: str = f"model.layers.{index}.") -> torch.Tensor:
            return tensors.get(prefix + name, size)

        normed_heads = shape.model_type == "qwen3"
        layers.append(
            LlamaLayer(
                qkv=torch.cat([get(f"self_attn.{n}_proj.weight", rows[n], d) for n in "qkv"]),
                qkv_bias=torch.cat([get(f"self_attn.{n}_proj.bias", rows[n]) for n in "qkv"]) if qkv_biased else None,
                out=get("self_attn.o_proj.weight", d, attention),
                out_bias=get("self_attn.o_proj.bias", d) if out_biased else None,
                gate_up=torch.cat([get(f"mlp.{n}_proj.weight", shape.intermediate_size, d) for n in ("gate", "up")]),
                down=get("mlp.down_proj.weight", d, shape.intermediate_size),
                input_norm=get("input_layernorm.weight", d),
                post_norm=get("post_attention_layernorm.weight", d),
                q_norm=get("self_attn.q_norm.weight", shape.head_dim) if normed_heads else None,
                k_norm=get("self_attn.k_norm.weight", shape.head_dim) if normed_heads else None,
            )
        )
    embed = tensors.get("model.embed_tokens.weight", (shape.vocab_size, d))
    return LlamaWeights(
        shape=shape,
        embed=embed,
        layers=tuple(layers),
        final_norm=tensors.get("model.norm.weight", (d,)),
        head=embed if shape.tied else tensors.get("lm_head.weight", (shape.vocab_size, d)),
    )


class _TensorFiles:
    """Tensors of a model directory by name, whichever shard holds them."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                handle = safe_open(path, framework="pt")
            except Exception as error:  # safetensors raises its own type, OSError or ValueError by damage
                raise BadInput(
                    f"{path} cannot be read", f"{type(error).__name__}: {error}", "fetch the file again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = handle

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._files:
            raise BadInput(f"tensor {name} is missing", "the weights are incomplete", "fetch the model again")
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadInput(
                f"tensor {name} has shape {list(tensor.shape)}",
                f"config.json asks for {list(shape)}",
                "config.json and the weights belong to different models; fetch both again",
            )
        if tensor.dtype not in FLOATS:
            raise BadInput(
                f"tensor {name} holds {tensor.dtype}",
                "the weights are quantised or foreign; float32, float16 or bfloat16 is needed",
                "fetch the unquantised model",
            )
        return tensor.to(self._dtype)


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, else model.safetensors, else every safetensors file."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [directory / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{index} is not a weight index", f"{error!r}", "fetch the file again") from error
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise BadInput(
                f"{len(absent)} shards are missing, such as {absent[0]}", f"{index} names them", "fetch them"
            )
        return paths
    single = directory / "model.safetensors"
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise BadInput(f"no safetensors file in {directory}", "the weights are missing", "fetch the model again")
    return paths
