"""The stack of Kimi K3: 93 layers joined by attention residuals, and what a draft taps of them (spec §H.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import PREFIX, KimiK3Shape
from k3dspark.model.ops import rms_norm
from k3dspark.target.kimi_k3_kda import DeltaAttention, DeltaRows, DeltaState
from k3dspark.target.kimi_k3_mla import LatentAttention
from k3dspark.target.kimi_k3_moe import MixtureOfExperts, SituMlp
from k3dspark.target.kimi_k3_residuals import ResidualMix
from k3dspark.target.kimi_k3_tensors import Tensors, wide_dtype

TapStream = Literal["prefix", "attn_res"]


@dataclass(frozen=True)
class Batch:
    """Rows of B sequences, token-major, and what these sequences hold already."""

    lengths: tuple[int, ...]
    slots: Tensor  # int64 [R]: where each row stands among B · max(lengths)
    delta: DeltaState  # [L, B, …] of the KDA layers
    contexts: Sequence[Sequence[Sequence[Tensor]]]  # [MLA layer][sequence]: chunks of cached rows [n, W]

    @property
    def size(self) -> tuple[int, int]:
        return len(self.lengths), max(self.lengths)


@dataclass(frozen=True)
class StackOutput:
    """hidden [R, d] after the final norm; taps [R, N·d]; provisional rows of the KDA and the MLA layers."""

    hidden: Tensor
    taps: Tensor
    delta: DeltaRows | None  # [L, B, T, …]
    latent: Tensor  # [L, R, W]


class KimiK3Layer:
    """Attention and MLP of one layer, each behind a norm of a mixture over depth."""

    def __init__(self, shape: KimiK3Shape, layer: int, tensors: Tensors) -> None:
        self.attention: DeltaAttention | LatentAttention
        attention = tensors.under("self_attn.")
        if layer in shape.kda_layers:
            self.attention = DeltaAttention(shape, attention)
        else:
            self.attention = LatentAttention(shape, attention)
        self.mlp: SituMlp | MixtureOfExperts
        if layer < shape.dense_layers:
            self.mlp = SituMlp(shape, tensors.under("mlp."))
        else:
            self.mlp = MixtureOfExperts(shape, tensors.under("block_sparse_moe."))
        self.attention_mix = ResidualMix(tensors, "self_attention_res", shape.eps)
        self.mlp_mix = ResidualMix(tensors, "mlp_res", shape.eps)
        self.input_norm = tensors.get("input_layernorm.weight")
        self.post_norm = tensors.get("post_attention_layernorm.weight")


class KimiK3Model:
    """The text model. It keeps nothing of a sequence: a forward takes a `Batch` and returns provisional rows."""

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        root = tensors.under(f"{PREFIX}model.")
        self.shape = shape
        self.embed_weight = root.get("embed_tokens.weight")
        self.head_weight = tensors.get(f"{PREFIX}lm_head.weight")
        self.norm = root.get("norm.weight")
        self.output_mix = ResidualMix(root, "output_attn_res", shape.eps)
        self.layers = [KimiK3Layer(shape, i, root.under(f"layers.{i}.")) for i in range(shape.layers)]

    def stack(self, ids: Tensor, batch: Batch, tap_layer_ids: Sequence[int], stream: TapStream) -> StackOutput:
        """Run token ids [R]. `stream` says what a tap of layer i is.

        "prefix": the running sum after the layer, MLP included, which starts anew with every block of layers.
        "attn_res": the mixture that layer i + 1 reads (after the last layer: the output mixture).
        """
        eps = self.shape.eps
        prefix, banks = F.embedding(ids, self.embed_weight), list[Tensor]()
        taps: dict[int, Tensor] = {}
        delta: list[DeltaRows] = []
        latent: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = layer.attention_mix(prefix, banks) if banks else prefix
            if stream == "attn_res":
                taps[index - 1] = x
            normed = rms_norm(x, layer.input_norm, eps)
            if isinstance(layer.attention, DeltaAttention):
                state = DeltaState(batch.delta.inputs[len(delta)], batch.delta.memory[len(delta)])
                attended, changes = layer.attention(normed, state, batch.slots, batch.size)
                delta.append(changes)
            else:
                attended, cached = layer.attention(normed, batch.contexts[len(latent)], batch.lengths)
                latent.append(cached)
            if index % self.shape.block_size == 0:
                banks.append(prefix)
                prefix = attended
            else:
                prefix = prefix + attended
            prefix = prefix + layer.mlp(rms_norm(layer.mlp_mix(prefix, banks), layer.post_norm, eps))
            if stream == "prefix":
                taps[index] = prefix
            taps = {i: tap for i, tap in taps.items() if i in tap_layer_ids}
        mixed = self.output_mix(prefix, banks)
        if stream == "attn_res":
            taps[len(self.layers) - 1] = mixed
        chosen = [taps[i] for i in sorted(tap_layer_ids)]
        rows = prefix.shape[0]
        return StackOutput(
            rms_norm(mixed, self.norm, eps),
            torch.cat(chosen, -1) if chosen else prefix.new_empty(rows, 0),
            DeltaRows.stack(delta) if delta else None,
            torch.stack(latent) if latent else prefix.new_empty(0, rows, self.shape.row_width),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of final-normed hidden states, in fp32 or more."""
        return F.linear(hidden, self.head_weight).to(wide_dtype(hidden.dtype))
