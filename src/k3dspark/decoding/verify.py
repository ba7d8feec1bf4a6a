"""Which draft tokens stand, and the token after them: pure functions on tensors, each with its proof (spec D).

Notation in the proofs: p_i is the target's distribution at slot i given x_<i, q_i the draft's, x_i ~ q_i the drafted
token, ℓ the verify length. Slots count from 1 there, columns from 0.

Rows of the target are ragged and token-major: request b owns ℓ_b + 1 consecutive rows, p_1 … p_{ℓ_b+1}. Proposals may
be truncated to candidates; q is zero elsewhere. A proposal without probabilities is one-hot at its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3dspark.decoding.sampling import draw
from k3dspark.model.proposal import Proposal


@dataclass(frozen=True)
class Draws:
    """Uniform numbers in [0, 1), independent of those the draft was drawn with and of each other (spec D.5).

    `accept` [B, K], one per slot; `final` [B], for the token after the accepted ones.
    """

    accept: Tensor
    final: Tensor


@dataclass(frozen=True)
class Accepted:
    """`count` int64 [B], draft tokens that stand; `next_token` int64 [B], the target's token after them."""

    count: Tensor
    next_token: Tensor


def verify_greedy(target_choice: Tensor, proposal: Proposal, lengths: Tensor) -> Accepted:
    """Accept while the draft equals the target's choice; `target_choice` int64 [R] is the argmax of every target row.

    Proof: the rows up to the first disagreement were computed on exactly the tokens plain decoding would have run, so
    their argmaxes are its tokens; the row of the first disagreement (or the row after a full block) supplies one more.
    """
    slots = proposal.tokens.shape[1]
    choice = target_choice[row_index(lengths, slots)]  # [B, K+1]
    agree = (proposal.tokens == choice[:, :slots]) & live_slots(lengths, slots)
    count = agree.long().cumprod(1).sum(1)
    return Accepted(count, choice.gather(1, count[:, None]).squeeze(1))


def verify_token(target_probs: Tensor, proposal: Proposal, lengths: Tensor, draws: Draws) -> Accepted:
    """Accept slot by slot with probability min(1, p/q) (Leviathan et al. 2023, Chen et al. 2023); target_probs [R, V].

    Proof: P(x_i = v and accepted) = min(p_i, q_i)(v). A rejection has probability 1 − Σ min(p_i, q_i) = Σ (p_i − q_i)₊
    and draws from (p_i − q_i)₊ normalised, so P(output v) = min(p_i, q_i)(v) + (p_i − q_i)₊(v) = p_i(v). Induct over i;
    after a full block the token is drawn from p_{ℓ+1} itself.
    """
    p, q = drafted_probs(target_probs, proposal, lengths)
    passed = (draws.accept * q < p) & live_slots(lengths, p.shape[1])
    count = passed.long().cumprod(1).sum(1)
    mass = final_mass(target_probs, proposal, lengths, count, target_probs.new_ones(len(count)))
    return Accepted(count, draw(mass, draws.final))


def verify_block(target_probs: Tensor, proposal: Proposal, lengths: Tensor, draws: Draws) -> Accepted:
    """Accept the longest prefix whose slot passes u_i < h_i (block verification, Sun et al. 2024); target_probs [R, V].

    w_0 = 1, w_i = min(1, w_{i−1} p_i(x_i) / q_i(x_i)); R_i = Σ_v (w_i p_{i+1} − q_{i+1})₊;
    h_i = R_i / (R_i + 1 − w_i) for i < ℓ, h_ℓ = w_ℓ; τ = max{i : u_i < h_i}, and the next token is drawn from
    (w_τ p_{τ+1} − q_{τ+1})₊ normalised, or from p_{ℓ+1} when τ = ℓ.

    Proof: P(τ ≥ i | x_≤i) = w_i, downwards from i = ℓ where h_ℓ = w_ℓ. Averaged over x_{i+1},
    P(τ ≥ i+1 | x_≤i) = Σ_v q_{i+1} min(1, w_i p_{i+1} / q_{i+1}) = Σ_v min(q_{i+1}, w_i p_{i+1}) = w_i − R_i. Since u_i
    is independent of all that decides τ ≥ i+1, P(τ ≥ i | x_≤i) = (w_i − R_i) + (1 − w_i + R_i) h_i = w_i. So
    P(τ = i | x_≤i) = R_i, and "τ ≥ i and the next output is v" has mass min(q, w_i p) + (w_i p − q)₊ = w_i p_{i+1}(v):
    whoever reaches i continues with exactly p_{i+1}. Where R_i = 0, i is never the end, so its mass is never needed.
    It accepts at least as many tokens in expectation as `verify_token`.
    """
    weights, thresholds = block_thresholds(target_probs, proposal, lengths)  # [B, K+1], [B, K]
    slots = thresholds.shape[1]
    passed = (draws.accept < thresholds) & live_slots(lengths, slots)
    slot = torch.arange(1, slots + 1, device=passed.device)
    count = torch.cat([torch.zeros_like(lengths[:, None]), passed * slot], 1).amax(1)
    weight = weights.gather(1, count[:, None]).squeeze(1)
    return Accepted(count, draw(final_mass(target_probs, proposal, lengths, count, weight), draws.final))


def block_thresholds(target_probs: Tensor, proposal: Proposal, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """w_0 … w_K [B, K+1] and h_1 … h_K [B, K] of `verify_block`; slots past a request's length hold nothing."""
    p, q = drafted_probs(target_probs, proposal, lengths)
    slots = p.shape[1]
    weights = [target_probs.new_ones(len(p))]
    for i in range(slots):
        weights.append((weights[-1] * p[:, i] / q[:, i]).clamp(max=1.0))
    rows = row_index(lengths, slots)
    thresholds = []
    for i in range(1, slots + 1):
        w = weights[i]
        if i == slots:
            thresholds.append(w)
            continue
        # Σ_v (w p − q)₊ = w − Σ_v min(w p, q), and the minimum is zero outside the draft's candidates.
        rest = (w - _overlap(target_probs, rows[:, i], proposal, i, w)).clamp(min=0.0)
        below = rest + 1.0 - w
        h = torch.where(below > 0, rest / below, 1.0)
        thresholds.append(torch.where(lengths == i, w, h))
    return torch.stack(weights, 1), torch.stack(thresholds, 1) if slots else p


def drafted_probs(target_probs: Tensor, proposal: Proposal, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """p_i(x_i) and q_i(x_i), both [B, K]."""
    slots = proposal.tokens.shape[1]
    p = target_probs[row_index(lengths, slots)[:, :slots], proposal.tokens]
    if proposal.probs is None:
        return p, torch.ones_like(p)
    if proposal.token_ids is None:
        q = proposal.probs.gather(-1, proposal.tokens[..., None]).squeeze(-1)
    else:
        q = (proposal.probs * (proposal.token_ids == proposal.tokens[..., None])).sum(-1)
    return p, q.to(p.dtype)


def final_mass(target_probs: Tensor, proposal: Proposal, lengths: Tensor, count: Tensor, weight: Tensor) -> Tensor:
    """Unnormalised distribution [B, V] of the token after `count` accepted ones: (weight · p − q)₊, or p at the end.

    Rounding may leave no mass where p and q agree; p is right then.
    """
    slots = proposal.tokens.shape[1]
    row = target_probs[row_index(lengths, slots).gather(1, count[:, None]).squeeze(1)]  # [B, V]
    if slots == 0:
        return row
    cut_short = (count < lengths).to(row.dtype)
    slot = count.clamp(max=slots - 1)
    pick = torch.arange(len(slot), device=slot.device)
    if proposal.probs is None:
        ids, q = proposal.tokens[pick, slot][:, None], torch.ones_like(row[:, :1])
    else:
        q = proposal.probs[pick, slot].to(row.dtype)
        ids = _columns(proposal, pick, slot, q)
    mass = (row * weight[:, None]).scatter_add(1, ids, -q * cut_short[:, None]).clamp(min=0.0)
    usable = (mass.amax(1) > 0) & (cut_short > 0)
    return torch.where(usable[:, None], mass, row)


def _overlap(target_probs: Tensor, row: Tensor, proposal: Proposal, slot: int, weight: Tensor) -> Tensor:
    """Σ_v min(weight · p, q) [B] at column `slot`, p being the target's rows `row` [B]."""
    if proposal.probs is None:
        return weight * target_probs[row, proposal.tokens[:, slot]]
    q = proposal.probs[:, slot].to(weight.dtype)
    pick = torch.arange(len(row), device=row.device)
    p = target_probs[row].gather(1, _columns(proposal, pick, torch.full_like(row, slot), q))
    # The last entry of `cumsum` adds a row in an order that does not depend on how many rows there are.
    return torch.minimum(weight[:, None] * p, q).cumsum(-1)[:, -1]


def _columns(proposal: Proposal, request: Tensor, slot: Tensor, like: Tensor) -> Tensor:
    """Target ids [B, C] of the columns of `probs` at the slot of each request."""
    ids = proposal.token_ids
    if ids is None:
        return torch.arange(like.shape[1], device=like.device).expand_as(like)
    return ids.expand_as(like) if ids.dim() == 1 else ids[request, slot]


def take(proposal: Proposal, requests: Sequence[int]) -> Proposal:
    """The rows of these requests, in this order; a row may be taken more than once."""
    index = torch.tensor(requests, device=proposal.tokens.device)
    ids = proposal.token_ids
    return Proposal(
        tokens=proposal.tokens[index],
        confidence=proposal.confidence[index],
        probs=None if proposal.probs is None else proposal.probs[index],
        token_ids=ids if ids is None or ids.dim() == 1 else ids[index],
    )


def join(parts: Sequence[Proposal]) -> Proposal:
    """One proposal of several made by the same draft in the same way."""
    first, probs = parts[0], [p.probs for p in parts if p.probs is not None]
    ids = [p.token_ids for p in parts if p.token_ids is not None]
    return Proposal(
        tokens=torch.cat([p.tokens for p in parts]),
        confidence=torch.cat([p.confidence for p in parts]),
        probs=torch.cat(probs) if probs else None,
        token_ids=first.token_ids if first.token_ids is None or first.token_ids.dim() == 1 else torch.cat(ids),
    )


def row_index(lengths: Tensor, slots: int) -> Tensor:
    """int64 [B, K+1]: the ragged row of each slot; slots past a request's length repeat its last row."""
    own = lengths + 1
    first = own.cumsum(0) - own
    step = torch.arange(slots + 1, device=lengths.device)
    return first[:, None] + torch.minimum(step, lengths[:, None])


def live_slots(lengths: Tensor, slots: int) -> Tensor:
    """bool [B, K]: slots that are verified."""
    return torch.arange(slots, device=lengths.device) < lengths[:, None]
