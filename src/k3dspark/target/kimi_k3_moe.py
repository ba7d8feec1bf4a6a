"""SiTU, the dense MLP, the router, and experts that work in a latent space (spec §H.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape
from k3dspark.model.ops import rms_norm
from k3dspark.target.kimi_k3_tensors import Tensors, wide_dtype


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """β·tanh(g/β)·σ(g) × β_l·tanh(u/β_l): SwiGLU with both factors bounded, in fp32."""
    wide = wide_dtype(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    return (beta * (g / beta).tanh() * g.sigmoid() * linear_beta * (u / linear_beta).tanh()).to(gate.dtype)


class SituMlp:
    """The first layer's MLP, and the shared experts of every other layer as one wide MLP."""

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        self.betas = (shape.situ_beta, shape.situ_linear_beta)
        self.gate_up = torch.cat([tensors.get("gate_proj.weight"), tensors.get("up_proj.weight")])
        self.down = tensors.get("down_proj.weight")

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(situ(gate, up, *self.betas), self.down)


class Router:
    """Sigmoid scores; the bias takes part in the choice of experts only, not in their weights."""

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        self.chosen, self.renormalize, self.scale = shape.experts_per_token, shape.renormalize, shape.routed_scale
        self.weight, self.bias = tensors.wide("weight"), tensors.wide("e_score_correction_bias")

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [R, k] of rows x [R, d] and their weights [R, k] in fp32."""
        scores = F.linear(x.to(self.weight.dtype), self.weight).sigmoid()  # [R, E]
        experts = (scores + self.bias).topk(self.chosen, -1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale


class MixtureOfExperts:
    """Shared experts on the hidden state, beside routed ones between a projection down and one up again.

    The router reads the hidden state. The norm stands once, on the weighted sum, before the projection up.
    """

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        self.eps, self.betas = shape.eps, (shape.situ_beta, shape.situ_linear_beta)
        self.router = Router(shape, tensors.under("gate."))
        self.shared = SituMlp(shape, tensors.under("shared_experts."))
        self.down, self.up = tensors.get("routed_expert_down_proj.weight"), tensors.get("routed_expert_up_proj.weight")
        self.norm = tensors.get("routed_expert_norm.weight") if shape.latent_norm else None
        # Filled one by one: a list of all matrices besides would double the memory of what is nearly the whole model.
        size, latent = shape.expert_size, shape.latent_size
        self.gate_up = self.down.new_empty(shape.experts, 2 * size, latent)
        self.inner_down = self.down.new_empty(shape.experts, latent, size)
        for expert in range(shape.experts):
            self.gate_up[expert, :size] = tensors.get(f"experts.{expert}.w1.weight")
            self.gate_up[expert, size:] = tensors.get(f"experts.{expert}.w3.weight")
            self.inner_down[expert] = tensors.get(f"experts.{expert}.w2.weight")

    def __call__(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        latent = F.linear(x, self.down)
        mixed = torch.zeros_like(latent, dtype=weights.dtype)
        for expert in experts.unique().tolist():
            rows, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(latent[rows], self.gate_up[expert]).chunk(2, -1)
            output = F.linear(situ(gate, up, *self.betas), self.inner_down[expert])
            mixed.index_add_(0, rows, output.to(mixed.dtype) * weights[rows, place, None])
        routed = mixed.to(x.dtype)
        if self.norm is not None:
            routed = rms_norm(routed, self.norm, self.eps)
        return F.linear(routed, self.up) + self.shared(x)
