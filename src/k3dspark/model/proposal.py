"""What the draft hands to the verifier, and how it is asked to sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftSampling:
    """How one block is sampled.

    temperature [B]: 0 (below 1e-5) is greedy. uniforms [B, K] in [0, 1): the draft's own random stream, needed
    where any temperature is positive. candidates: keep only the C best base logits of each slot for the Markov
    loop; the distribution is renormalised over them, so verification stays exact (spec §B.3).
    """

    temperature: Tensor | None = None
    uniforms: Tensor | None = None
    candidates: int | None = None

    @property
    def greedy(self) -> bool:
        """True when no row samples (decided once, on the host, before the block)."""
        return self.temperature is None or self.uniforms is None


@dataclass(frozen=True)
class Proposal:
    """K draft tokens for each of B sequences.

    tokens [B, K] target vocabulary ids; confidence [B, K] fp32 logits g_k of the confidence head (σ gives the
    estimated acceptance probability); probs [B, K, C] fp32, the very distribution each token was drawn from, or
    None for a greedy block (then it is one-hot); token_ids [C] or [B, K, C], the target ids of the C columns of
    probs, or None when columns are the target vocabulary itself.
    """

    tokens: Tensor
    confidence: Tensor
    probs: Tensor | None = None
    token_ids: Tensor | None = None

    def dense_probs(self, vocab_size: int) -> Tensor:
        """q [B, K, V] fp32 over the target vocabulary, zeros outside the candidates, one-hot when greedy."""
        batch, slots = self.tokens.shape
        if self.probs is None:
            one_hot = torch.zeros(batch, slots, vocab_size, device=self.tokens.device)
            return one_hot.scatter_(-1, self.tokens[..., None], 1.0)
        if self.token_ids is None:
            return self.probs
        dense = self.probs.new_zeros(batch, slots, vocab_size)
        return dense.scatter_(-1, self.token_ids.expand_as(self.probs), self.probs)
