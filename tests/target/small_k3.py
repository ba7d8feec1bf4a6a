"""A Kimi K3 of seven layers in blocks of three: every kind of layer, and both ends of a block, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3dspark.checkpoint.inventory import TensorSpec
from k3dspark.checkpoint.kimi_k3 import KimiK3Shape, kimi_k3_tensors
from k3dspark.checkpoint.mini_kimi_k3 import mini_blocks, mini_kimi_k3_config
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_model import KimiK3Model, TapStream
from k3dspark.target.kimi_k3_tensors import Tensors

LAYERS = 7
VOCABULARY = 61


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
