"""A Kimi K3 of seven layers in blocks of three: every kind of layer, and both ends of a block, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3dspark.checkpoint.inventory import TensorSpec
from k3dspark.checkpoint.kimi_k3 import PREFIX, KimiK3Shape, kimi_k3_tensors
from k3dspark.checkpoint.mini_kimi_k3 import mini_blocks, mini_kimi_k3_config
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_model import KimiK3Model, TapStream
from k3dspark.target.kimi_k3_tensors import Tensors
from tiny_models import CHAT_TEMPLATE, byte_tokenizer

LAYERS = 7
VOCABULARY = 61

READS = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_proj", "q_a_proj", "kv_a_proj_with_mqa")
READS_MLP = ("gate_proj", "up_proj", "gate", "routed_expert_down_proj")
WRITES = ("o_proj", "down_proj", "routed_expert_up_proj")


def small_config(**changes: Any) -> dict[str, Any]:
    """config.json; `changes` go to the text model, those of `linear_attn_config` to that."""
    config = mini_kimi_k3_config()
    text = config["text_config"]
    text["linear_attn_config"] |= {
        "num_heads": 2,
        "head_dim": 8,
        "kda_layers": [1, 2, 3, 5, 6],
        "full_attn_layers": [4, 7],
        **changes.pop("linear_attn_config", {}),
    }
    text.update(
        num_hidden_layers=LAYERS,
        hidden_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        attn_res_block_size=3,
        num_experts=4,
        intermediate_size=48,
    )
    text.update(changes)
    return config


def small_shape(**changes: Any) -> KimiK3Shape:
    return KimiK3Shape.from_config(small_config(**changes))


def random_tensors(shape: KimiK3Shape, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor under its published name, in fp32."""
    tensors = {}
    for name, size in kimi_k3_tensors(shape).items():
        (values,) = mini_blocks(TensorSpec(name, "F32", size, ()), seed)
        tensors[name] = torch.from_numpy(values).view(size)
    return tensors


def small_model(tensors: dict[str, Tensor] | None = None, **changes: Any) -> KimiK3Model:
    """In fp64, so that a difference is never rounding."""
    shape = small_shape(**changes)
    return KimiK3Model(shape, Tensors((tensors or random_tensors(shape)).__getitem__, torch.float64))


def small_target(
    taps: Sequence[int] = (0, 2, 5), stream: TapStream = "prefix", tensors: dict[str, Tensor] | None = None
) -> KimiK3Target:
    return KimiK3Target(small_model(tensors), taps, stream)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def write_small_k3(directory: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A model directory with a byte tokenizer, weights in fp32."""
    directory.mkdir()
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(small_config(**changes)))
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def rotated(tensors: dict[str, Tensor], rotation: Tensor) -> dict[str, Tensor]:
    """The same model with every hidden state s as Q·s, as QuaRot makes it: norms go into the matrices behind them."""
    result = {name: tensor.double() for name, tensor in tensors.items()}
    norms = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    norms["block_sparse_moe"] = norms["mlp"]
    for name, tensor in list(result.items()):
        parts = name.split(".")
        part = parts[-2] if len(parts) > 1 else ""
        inside = parts[4] if len(parts) > 5 else ""
        if part.endswith("_res_proj"):  # meets its norm in the score only
            direction = tensor * result[name.replace("_proj", "_norm")]
            result[name] = direction @ rotation.T
        elif name.endswith("embed_tokens.weight"):
            result[name] = tensor @ rotation.T
        elif name.endswith("lm_head.weight"):
            result[name] = (tensor * result[f"{PREFIX}model.norm.weight"]) @ rotation.T
        elif parts[-1] == "weight" and inside in norms and ".experts." not in name:
            if part in (READS if inside == "self_attn" else READS_MLP):
                norm = result[".".join([*parts[:4], norms[inside], "weight"])]
                result[name] = (tensor * norm) @ rotation.T
            elif part in WRITES:
                result[name] = rotation @ tensor
    for name in result:
        if name.endswith(("_layernorm.weight", "_res_norm.weight", "model.norm.weight")) and "_a_layernorm" not in name:
            result[name] = torch.ones_like(result[name])
    return result
