"""The operators that a device may replace, each with the plain PyTorch reference that any device runs.

RMSNorm, interleaved rotation, attention over latent rows, and linear maps with prepacked weights. Nothing here
synchronises with the host, and nothing here knows about layers or configs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
    workspace is bounded by the largest chunk (spec §A.5, split softmax).
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ block.T).to(wide) * scale  # [Q, K]
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask, float("-inf"))
    if len(context) == 1:  # the common case: one softmax over both parts
        both = torch.cat([(query @ context[0].T).to(wide) * scale, scores], -1).softmax(-1).to(query.dtype)
        split = context[0].shape[0]
        return both[:, :split] @ context[0][:, :rank] + both[:, split:] @ block[:, :rank]
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total, mixed = weights.sum(-1, keepdim=True), weights.to(query.dtype) @ block[:, :rank]
    mixed = mixed.to(wide)
    for rows in context:
        scores = (query @ rows.T).to(wide) * scale
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + (weights.to(query.dtype) @ rows[:, :rank]).to(wide)
        top = new_top
    return (mixed / total).to(query.dtype)


def attend_expanded(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Plain softmax attention, softmax in fp32: query [..., Q, e], key [..., n, e], value [..., n, v] → [..., Q, v].

    `mask` broadcasts to [..., Q, n], True where visible. A query that sees nothing returns zeros, not NaN.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ key.transpose(-1, -2)).to(wide) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return weights.to(query.dtype) @ value


class PackedLinear:
    """y = x·Wᵀ + b with the weight laid out once for small row counts.

    On a CPU, oneDNN's packed weights make a few rows cost about as much as one. The operators are private to
    PyTorch, so a build without them (and every other device) takes `F.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rows: int = 8) -> None:
        self.weight = weight.detach()
        self.bias = bias.detach() if bias is not None else None
        self._packed = _prepack(self.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self._packed, self.bias, "none", [], "")
        return y.view(*x.shape[:-1], -1)


def _prepack(weight: Tensor, rows: int) -> Tensor | None:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype == torch.bfloat16 and not native_bfloat16():
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # this build of PyTorch has no such operator
        return None
    return packed


def native_bfloat16() -> bool:
    """True where this CPU multiplies bf16 in hardware (AVX512-BF16 or AMX); elsewhere fp32 is faster."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in probes)
