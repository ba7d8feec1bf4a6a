"""Attention residuals: what a layer reads is a mixture over depth (spec §H.3, arXiv 2603.15031)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3dspark.target.kimi_k3_tensors import Tensors


class ResidualMix:
    """Softmax over the banks and the running prefix sum, scored after normalisation; the values stay as they are.

    The norm's weight and the projection only meet in the score, Σ v̂·w_norm·w_proj: one vector holds their product.
    """

    def __init__(self, tensors: Tensors, name: str, eps: float) -> None:
        self.direction = tensors.wide(f"{name}_norm.weight") * tensors.wide(f"{name}_proj.weight")[0]  # [d]
        self.eps = eps

    def __call__(self, prefix: Tensor, banks: Sequence[Tensor]) -> Tensor:
        """[R, d] of the prefix sum [R, d] and the banks [R, d] before it."""
        values = torch.stack([*banks, prefix]).to(self.direction.dtype)  # [N + 1, R, d]
        scores = (values @ self.direction) * torch.rsqrt(values.square().mean(-1) + self.eps)  # [N + 1, R]
        return (values * scores.softmax(0).unsqueeze(-1)).sum(0).to(prefix.dtype)
