"""From logits to the distribution that is sampled: one pipeline, for plain and for speculative decoding (spec D.1).

Order: logit bias, repetition, frequency and presence penalties with the history of the row; temperature; top-k;
top-p; min-p; renormalise. Tokens that tie at a cut stay or go together, so no rule depends on token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3dspark.decoding.params import SamplingParams

BEST = 256  # logits looked at first for a cut; a distribution that needs more is sorted further


@dataclass(frozen=True)
class History:
    """What penalties count: tokens of the prompt, and tokens generated so far, the anchor included."""

    prompt_ids: Sequence[int]
    new_ids: Sequence[int]


def adjust(logits: Tensor, drafted: Tensor, history: History, params: SamplingParams) -> Tensor:
    """Bias and penalties of one request's rows, logits [ℓ+1, V] → new tensor of that shape.

    Row i predicts the token after i drafted tokens [ℓ], so its history includes the first i of them.
    """
    rows, vocab = logits.shape
    logits = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    counts = _count(history.new_ids, logits).expand(rows, vocab).clone()  # [ℓ+1, V]
    row, slot = torch.tril_indices(rows, rows - 1, -1, device=logits.device)  # all pairs row > slot
    counts.index_put_((row, drafted[slot]), counts.new_ones(()), accumulate=True)
    if params.repetition_penalty != 1.0:
        seen = (counts > 0) | (_count(history.prompt_ids, logits) > 0)
        shrunk = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, shrunk, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).to(logits.dtype)


def _count(ids: Sequence[int], like: Tensor) -> Tensor:
    """Occurrences of every token, [V], in the dtype and on the device of `like`."""
    counted = torch.tensor(ids, dtype=torch.long, device=like.device)
    return torch.bincount(counted, minlength=like.shape[-1]).to(like.dtype)


def distribution(logits: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [R, V] of logits [R, V]; `settings` has one entry per row, none of them greedy."""
    temperature = _column([s.temperature for s in settings], logits)
    scaled = logits / temperature
    if not any(s.truncated for s in settings):
        return scaled.softmax(-1)
    return scaled.masked_fill(scaled < _cut(scaled, settings), -torch.inf).softmax(-1)


def _cut(scaled: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit [R, 1] that stays; sorts only as many of the largest logits as it takes to know."""
    vocab, probs = scaled.shape[-1], scaled.softmax(-1)
    top_k = torch.tensor([s.top_k or vocab for s in settings], device=scaled.device).clamp(max=vocab)[:, None]
    top_p, min_p = (_column(values, scaled) for values in ([s.top_p for s in settings], [s.min_p for s in settings]))
    best = min(vocab, max(BEST, *(s.top_k for s in settings)))
    logits, ids = scaled.topk(best, -1)  # [R, best], descending
    by_k = torch.where(top_k < vocab, logits.gather(-1, top_k.clamp(max=best) - 1), -torch.inf)
    by_min = logits[:, :1] + min_p.log()  # p ≥ min_p · p_max, as logits
    kept = torch.ones_like(top_p)
    if any(s.top_k for s in settings):
        kept = _sum(probs.masked_fill(scaled < by_k, 0.0))  # mass that top-k leaves
    needed = top_p * kept
    reached = probs.gather(-1, ids).cumsum(-1) >= needed  # [R, best]
    by_p = logits.gather(-1, reached.int().argmax(-1, keepdim=True))
    # Off is off: rounding must not let a top-p of 1 cut the tail.
    by_p = torch.where(top_p < 1.0, by_p, -torch.inf)
    for row in (~reached[:, -1] & (top_p[:, 0] < 1.0)).nonzero().flatten().tolist():
        by_p[row] = _nucleus(scaled[row], probs[row], needed[row], kept[row])
    return torch.maximum(torch.maximum(by_p, by_k), by_min)


def _nucleus(logits: Tensor, probs: Tensor, needed: Tensor, kept: Tensor) -> Tensor:
    """The smallest logit [1] of the most probable tokens that together hold `needed`, for one flat row [V].

    The last of them has more than (kept − needed) / V, or the tokens from it on could not hold the rest of `kept`; so
    most of a vocabulary need not be sorted.
    """
    able = (probs > (kept - needed) / len(probs)).nonzero().flatten()
    if not len(able):  # NaN: nothing to cut here, the judge reports it
        return needed.new_full((1,), -torch.inf)
    ordered, order = logits[able].sort(descending=True)
    reached = probs[able[order]].cumsum(-1) >= needed
    return torch.where(reached[-1:], ordered[reached.int().argmax()], -torch.inf)


def draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF of unnormalised masses [B, V] at numbers [B] in [0, 1) → ids [B]; never an id without mass."""
    cumulative = mass.to(_widest(mass.device)).cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # u · total may round up to the total
    threshold = torch.minimum(uniform[:, None].to(total.dtype) * total, below)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def _widest(device: torch.device) -> torch.dtype:
    # fp32 sums over a large vocabulary would misplace its rare tokens; NPUs and Apple GPUs have nothing wider.
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def _sum(values: Tensor) -> Tensor:
    # Unlike `sum`, `cumsum` adds a row in an order that does not depend on how many rows there are.
    return values.cumsum(-1)[:, -1:]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
