"""Multi-head latent attention: absorbed for inference, expanded for training (spec §A.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3dspark.model import native
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.layers import Linear, RMSNorm
from k3dspark.model.native import NativeLinear
from k3dspark.model.ops import attend_latent, rotate_interleaved
from k3dspark.model.streamed import LinearMap, emulated, lay_out

Angles = tuple[Tensor, Tensor]


class LatentAttention(nn.Module):
    """One layer's attention. A *row* is [normalised latent | rotated key], kv_lora_rank + qk_rope_head_dim wide."""

    def __init__(self, config: K3DSparkConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        # 192-based at K3 geometry in both forms, never based on the 576 of the absorbed key.
        self.scale = config.softmax_scale
        d, eps = config.hidden_size, config.rms_norm_eps
        self.q_a_proj = Linear(d, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(d, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, eps)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.value))
        self.o_proj = Linear(self.heads * self.value, d)
        self._fused_a: LinearMap | None = None
        self._absorbed: tuple[Tensor, Tensor] | None = None
        self._lifting: Tensor | None = None  # set: our kernel attends

    def pack(self) -> None:
        """Lay weights out for inference: q_a and kv_a in one map, the two halves of kv_b apart."""
        self._fused_a = lay_out(self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight)
        halves = (half.detach() for half in self._up_projections())
        if emulated(self.kv_b_proj.weight):  # small, and batched products have no 16-bit form that is fast here
            halves = (half.float() for half in halves)
        up_key, up_value = (half.contiguous() for half in halves)
        self._absorbed = up_key, up_value
        self.q_b_proj.pack()
        self.o_proj.pack()
        if self._kernel_serves():
            self._lifting = up_key.transpose(1, 2).contiguous()  # [H, rank, nope]

    def context_rows(self, context: Tensor, angles: Angles) -> Tensor:
        """Rows [..., W] of context features [..., d] at the angles of their positions (spec §A.3)."""
        return self._rows(self.kv_a_proj_with_mqa(context), angles)

    def absorbed(
        self, z: Tensor, angles: Angles, context: Sequence[Sequence[Tensor]], block_mask: Tensor | None
    ) -> Tensor:
        """Attention of B blocks z [B, K, d] over each sequence's own context chunks and its own block → [B, K, d]."""
        if self._lifting is not None:
            return self._attended(z, angles, context, block_mask is not None)
        batch, slots, _ = z.shape
        if self._fused_a is not None:
            q_a, kv_a = self._fused_a(z).split([self.q_a_proj.out_features, self.rank + self.rope], -1)
        else:
            q_a, kv_a = self.q_a_proj(z), self.kv_a_proj_with_mqa(z)
        rows = self._rows(kv_a, angles)  # [B, K, W]
        q_nope, q_rope = self._queries(q_a, angles)  # [B, K, H, ·]
        up_key, up_value = self._absorbed if self._absorbed is not None else self._up_projections()
        # q̃_h = (W^UK_h)ᵀ q^n_h: one batched product over heads.
        lifted = torch.einsum("bkhn,hnr->bkhr", q_nope.to(up_key.dtype), up_key)
        query = torch.cat([lifted, q_rope.to(up_key.dtype)], -1).flatten(1, 2)  # [B, K*H, W]
        mask = None if block_mask is None else block_mask.repeat_interleave(self.heads, 0)  # [K*H, K]
        mixed = torch.stack(
            [attend_latent(query[b], context[b], rows[b], self.scale, self.rank, mask) for b in range(batch)]
        ).view(batch, slots, self.heads, self.rank)
        heads = torch.einsum("bkhr,hvr->bkhv", mixed, up_value)
        return self.o_proj(heads.flatten(-2).to(z.dtype))

    def _kernel_serves(self) -> bool:
        """fp32 on a CPU with our kernels, in widths that they take."""
        fp32 = self.kv_b_proj.weight.dtype == torch.float32 and isinstance(self._fused_a, NativeLinear)
        return fp32 and self.rank % 32 == 0 and self.rope % 2 == 0

    def _attended(self, z: Tensor, angles: Angles, context: Sequence[Sequence[Tensor]], causal: bool) -> Tensor:
        """`absorbed` by our kernel: one call a sequence from the projections to the heads."""
        assert self._lifting is not None
        assert self._absorbed is not None
        assert self._fused_a is not None
        batch, slots, _ = z.shape
        latent, threads, kernels = self.kv_a_layernorm, torch.get_num_threads(), native.kernels()
        gain = latent.gain
        assert gain is not None
        both = self._fused_a(z)  # [B, K, q_rank + rank + rope]
        start, stride = self.q_a_proj.out_features, both.shape[-1]
        query = self.q_b_proj(self.q_a_layernorm(both[..., :start]))  # [B, K, H * (nope + rope)]
        cosines, sines = (a.float().contiguous() for a in angles)  # [B, K, rope / 2]
        heads = torch.empty(batch, slots, self.heads * self.value)
        for b in range(batch):
            chunks = torch.tensor([chunk.data_ptr() for chunk in context[b]], dtype=torch.int64)
            counts = torch.tensor([len(chunk) for chunk in context[b]], dtype=torch.int64)
            kernels.latent(
                query[b].data_ptr(), both[b].data_ptr() + 4 * start, stride, gain.data_ptr(), latent.floor,
                cosines[b].data_ptr(), sines[b].data_ptr(), slots, self.heads, self.nope, self.rope, self.value,
                self.rank, self._lifting.data_ptr(), self._absorbed[1].data_ptr(), self.scale, causal,
                chunks.data_ptr(), counts.data_ptr(), len(chunks), heads[b].data_ptr(), threads,
            )  # fmt: skip
        return self.o_proj(heads)

    def expanded(
        self, z: Tensor, angles: Angles, context: Tensor, visible: Tensor, block_mask: Tensor | None
    ) -> Tensor:
        """Attention of A blocks of each of N sequences, z [N, A, K, d], keys and values spelt out per head.

        context [N, S, W] are rows of the sequence, visible bool [N, A, S] says which of them a block sees.
        """
        n, blocks, slots, _ = z.shape
        length = context.shape[1]
        rows = self._rows(self.kv_a_proj_with_mqa(z), angles)  # [N, A, K, W]
        query = torch.cat(self._queries(self.q_a_proj(z), angles), -1)  # [N, A, K, H, e]
        # One attention call: keys are the sequence's context rows, then every block's own rows.
        key, value = self._expand(torch.cat([context, rows.flatten(1, 2)], 1))  # [N, S + A*K, H, ·]
        own = torch.eye(blocks, dtype=torch.bool, device=z.device)[:, None, :, None]
        own = own.expand(blocks, slots, blocks, slots)
        if block_mask is not None:
            own = own & block_mask[None, :, None, :]
        mask = torch.cat(
            [
                visible[:, :, None].expand(n, blocks, slots, length).flatten(1, 2),
                own.reshape(1, blocks * slots, blocks * slots).expand(n, -1, -1),
            ],
            -1,
        )  # [N, A*K, S + A*K]
        heads = F.scaled_dot_product_attention(
            query.flatten(1, 2).transpose(1, 2),
            key.transpose(1, 2),
            F.pad(value, (0, key.shape[-1] - self.value)).transpose(1, 2),  # fused kernels want equal widths
            attn_mask=mask[:, None],
            scale=self.scale,
        )[..., : self.value]
        return self.o_proj(heads.transpose(1, 2).reshape(n, blocks, slots, -1))

    def _rows(self, kv_a: Tensor, angles: Angles) -> Tensor:
        latent, key = kv_a.split([self.rank, self.rope], -1)
        return torch.cat([self.kv_a_layernorm(latent), rotate_interleaved(key, *angles)], -1)

    def _queries(self, q_a: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        query = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.heads, self.nope + self.rope))
        nope, rope = query.split([self.nope, self.rope], -1)
        cos, sin = (a.unsqueeze(-2) for a in angles)
        return nope, rotate_interleaved(rope, cos, sin)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        per_head = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.rank)
        return per_head[:, : self.nope], per_head[:, self.nope :]

    def _expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, key = rows.split([self.rank, self.rope], -1)
        up = self.kv_b_proj(latent).unflatten(-1, (self.heads, self.nope + self.value))
        nope, value = up.split([self.nope, self.value], -1)
        shared = key.unsqueeze(-2).expand(*nope.shape[:-1], self.rope)
        return torch.cat([nope, shared], -1), value
