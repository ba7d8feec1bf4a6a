"""Gated multi-head latent attention without positions: the full-attention layers of Kimi K3 (spec §A.5, §A.7, §H.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape
from k3dspark.model.ops import attend_latent, rms_norm
from k3dspark.target.kimi_k3_tensors import Tensors

QUERY_ROWS = 64  # rows attended at once: bounds the scores, which take rows · heads · context numbers


class LatentAttention:
    """One MLA layer, absorbed form. A cached row is [normalised latent | shared part of the keys], not rotated.

    The output gate is a linear map of the layer's normalised input, σ, applied to every channel before o_proj. The
    norms of the query and key latents use the model's eps (spec §A.8); transformers leaves these two at 1e-6.
    """

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        self.heads, self.rank, self.eps = shape.heads, shape.kv_lora_rank, shape.eps
        self.nope = shape.qk_nope_head_dim
        self.scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
        self.latents = torch.cat([tensors.get("q_a_proj.weight"), tensors.get("kv_a_proj_with_mqa.weight")])
        self.sizes = [shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim]
        self.q_norm, self.kv_norm = tensors.get("q_a_layernorm.weight"), tensors.get("kv_a_layernorm.weight")
        self.q_b = tensors.get("q_b_proj.weight")
        up = tensors.get("kv_b_proj.weight").view(self.heads, -1, self.rank)
        self.up_key, self.up_value = up[:, : self.nope].contiguous(), up[:, self.nope :].contiguous()
        self.gate = tensors.get("g_proj.weight") if shape.output_gate else None
        self.out = tensors.get("o_proj.weight")

    def __call__(
        self, x: Tensor, contexts: Sequence[Sequence[Tensor]], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Rows x [R, d] of sequences with so many rows each, after their contexts (chunks of cached rows [n, W]).

        Returns the output [R, d] and the rows [R, W] to cache.
        """
        query_latent, latent, shared = F.linear(x, self.latents).split(self.sizes, -1)
        rows = torch.cat([rms_norm(latent, self.kv_norm, self.eps), shared], -1)  # [R, W]
        query = F.linear(rms_norm(query_latent, self.q_norm, self.eps), self.q_b).unflatten(-1, (self.heads, -1))
        lifted = torch.einsum("rhn,hnc->rhc", query[..., : self.nope], self.up_key)
        query = torch.cat([lifted, query[..., self.nope :]], -1)  # [R, H, W]
        mixed = torch.cat(
            [
                self._attend(q, context, own)
                for q, context, own in zip(query.split(list(lengths)), contexts, rows.split(list(lengths)), strict=True)
            ]
        )
        attended = torch.einsum("rhc,hvc->rhv", mixed, self.up_value).flatten(1)
        if self.gate is not None:
            attended = attended * F.linear(x, self.gate).sigmoid()
        return F.linear(attended, self.out), rows

    def _attend(self, query: Tensor, context: Sequence[Tensor], own: Tensor) -> Tensor:
        """query [T, H, W] over the context and, causally, its own rows [T, W] → [T, H, rank]."""
        pieces = []
        for first in range(0, query.shape[0], QUERY_ROWS):
            part = query[first : first + QUERY_ROWS]
            last = first + part.shape[0]
            mask = torch.ones(part.shape[0], last, dtype=torch.bool, device=query.device).tril(first)
            seen = attend_latent(
                part.flatten(0, 1), context, own[:last], self.scale, self.rank, mask.repeat_interleave(self.heads, 0)
            )
            pieces.append(seen.view(-1, self.heads, self.rank))
        return torch.cat(pieces) if pieces else query[..., : self.rank]
