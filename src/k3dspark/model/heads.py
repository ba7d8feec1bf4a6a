"""Markov head (bias from the previous token) and confidence head (spec §B, §C)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.streamed import LinearMap, emulated, lay_out


class Embedding(nn.Module):
    """A table [rows, width] read by index."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class MarkovHead(nn.Module):
    """B_k = W2·φ(W1[x_{k−1}], h_k): vanilla φ = e; gated φ = σ(G[h;e]+b)⊙e; rnn φ = tanh(o) with a state.

    W1 [V, r] and W2 [D, r] are both stored token-major, so shapes alone cannot tell them apart.
    """

    def __init__(self, config: K3DSparkConfig) -> None:
        super().__init__()
        rank, d = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.rank = rank
        self.markov_w1 = Embedding(config.vocab_size, rank)
        self.markov_w2 = Embedding(config.draft_vocab_size, rank)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + d, 3 * rank)
        self._packed_w2: LinearMap | None = None

    def pack(self) -> None:
        """Lay W2 out for products in fp32, once: converting it at every slot would cost more than the product."""
        weight = self.markov_w2.weight
        wide = weight if emulated(weight) else weight.to(torch.promote_types(weight.dtype, torch.float32))
        self._packed_w2 = lay_out(wide)

    def start(self, batch: tuple[int, ...]) -> Tensor | None:
        """The state before slot 0: zeros [*batch, r] for rnn, None otherwise."""
        return self.markov_w1.weight.new_zeros(*batch, self.rank) if self.kind == "rnn" else None

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """W1 rows [..., r] of the previous tokens and final-normed hidden [..., d] → (φ [..., r], next state)."""
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
            return gate * embedded, None
        if self.kind == "rnn":
            if state is None:
                raise ValueError("the rnn Markov head needs the state of the slot before; begin with start()")
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            return torch.tanh(output), state
        return embedded, None

    def bias(self, feature: Tensor, candidates: Tensor | None = None) -> Tensor:
        """W2·φ in fp32: [..., D], or [..., C] for candidate indices [..., C] into the draft vocabulary.

        bf16 would err by about 0.03 at magnitude 8, enough to flip an argmax (spec §B.2).
        """
        wide = torch.promote_types(feature.dtype, torch.float32)
        if candidates is None and self._packed_w2 is not None:
            return self._packed_w2(feature.to(wide))
        if candidates is None:
            return F.linear(feature.to(wide), self.markov_w2.weight.to(wide))
        rows = F.embedding(candidates, self.markov_w2.weight).to(wide)  # [..., C, r]
        return (rows @ feature.to(wide).unsqueeze(-1)).squeeze(-1)


class ConfidenceHead(nn.Module):
    """g_k = w·[ĥ_k ; W1[x_{k−1}]] + b in fp32; σ(g_k) estimates that x_k is accepted given its prefix was."""

    def __init__(self, config: K3DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits [...] of final-normed hidden [..., d] and W1 rows [..., r] of the previous tokens."""
        features = torch.cat([hidden, embedded], -1) if self.with_markov else hidden
        wide = torch.promote_types(features.dtype, torch.float32)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(features.to(wide), weight, bias).squeeze(-1)
