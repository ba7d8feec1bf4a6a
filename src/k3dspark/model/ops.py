"""The operators that a device may replace, each with the plain PyTorch reference that any device runs.

RMSNorm, interleaved rotation, and attention over latent rows (linear maps: `packed.py`). Nothing here
synchronises with the host, and nothing here knows about layers or configs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3dspark.model.packed import native_bf16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x·(mean(x²)+ε)^(-1/2) in fp32, cast to the input's dtype, then times the weight (spec §A.8; this order)."""
    wide = x.float() if x.dtype != torch.float64 else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x [..., r] by angles whose cos and sin [..., r/2] are given (spec §A.6)."""
    pairs = x.to(cos.dtype).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def attend_latent(
    query: Tensor, context: Sequence[Tensor], block: Tensor, scale: float, rank: int, block_mask: Tensor | None
) -> Tensor:
    """Absorbed MLA for one sequence: softmax over context rows and block rows, values = the first `rank` numbers.

    query [Q, W], context chunks of [n_i, W] (all visible), block rows [K, W], block_mask bool [Q, K] or None
    → [Q, rank]. Scores and softmax in fp32 (fp64 for fp64 input). Chunks are merged by log-sum-exp, so the
    workspace is bounded by the largest chunk (spec §A.5, split softmax). Rows may be narrower than the query.
    """
    given = query.dtype
    wide = torch.float64 if given == torch.float64 else torch.float32
    if given.itemsize == 2 and query.device.type == "cpu" and not native_bf16():
        query = query.to(wide)  # where 16-bit products are emulated, fp32 is seven times as fast
    block = block.to(query.dtype)
    scores = (query @ block.T).to(wide) * scale  # [Q, K]
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask, float("-inf"))
    if len(context) == 1:  # the common case: one softmax over both parts
        rows = context[0].to(query.dtype)
        both = torch.cat([(query @ rows.T).to(wide) * scale, scores], -1).softmax(-1).to(query.dtype)
        split = rows.shape[0]
        return (both[:, :split] @ rows[:, :rank] + both[:, split:] @ block[:, :rank]).to(given)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total, mixed = weights.sum(-1, keepdim=True), weights.to(query.dtype) @ block[:, :rank]
    mixed = mixed.to(wide)
    for chunk in context:
        rows = chunk.to(query.dtype)
        scores = (query @ rows.T).to(wide) * scale
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + (weights.to(query.dtype) @ rows[:, :rank]).to(wide)
        top = new_top
    return (mixed / total).to(given)
