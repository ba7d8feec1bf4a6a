"""From target logits to a verdict per request: which draft tokens stand, and the token after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from k3dspark.decoding.request import Request, TokenLogprob
from k3dspark.decoding.sampling import History, adjust, distribution
from k3dspark.decoding.streams import Stream, uniforms
from k3dspark.decoding.verify import Accepted, Draws, take, verify_block, verify_greedy, verify_token
from k3dspark.errors import EngineFault
from k3dspark.model.proposal import Proposal

CHUNK = 512


@dataclass(frozen=True)
class Verdict:
    """Accepted draft tokens and the target's own next token; or the fault that makes both meaningless."""

    accepted: tuple[int, ...]
    next_token: int
    fault: EngineFault | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def judge(logits: Tensor, proposal: Proposal, lengths: Sequence[int], requests: Sequence[Request]) -> list[Verdict]:
    """Verify every request's rows of `logits` fp32 [R, V]; everything crosses to the host in one transfer."""
    best, choice = first_maximum(logits)
    accepted = decide(logits, choice, proposal, lengths, requests)
    target_ok = torch.isfinite(best).long()  # [R]
    draft_ok = torch.isfinite(proposal.confidence).all(1).long()
    parts = (accepted.count, accepted.next_token, draft_ok, target_ok, proposal.tokens.flatten())
    flat = iter(torch.cat(parts).tolist())
    batch, slots = proposal.tokens.shape
    counts, next_tokens, drafts_ok, rows_ok = (list(islice(flat, n)) for n in (batch, batch, batch, len(best)))
    verdicts, row = [], 0
    for b, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        tokens = tuple(islice(flat, slots))
        if not all(rows_ok[row : row + length + 1]):
            verdict = _not_finite("target", request, "run it with the draft off and in fp32 to find the layer")
        elif length and not drafts_ok[b]:
            verdict = _not_finite("draft", request, "check the draft's weights with `k3dspark inspect`")
        else:
            verdict = Verdict(tokens[: counts[b]], next_tokens[b])
            if request.params.logprobs is not None:
                ids = (*verdict.accepted, verdict.next_token)
                best_too = request.params.logprobs
                verdict = replace(verdict, logprobs=logprobs(logits[row : row + len(ids)], ids, best_too))
        verdicts.append(verdict)
        row += length + 1
    return verdicts


def decide(
    logits: Tensor, choice: Tensor, proposal: Proposal, lengths: Sequence[int], requests: Sequence[Request]
) -> Accepted:
    """Run each request's own verifier over its rows; `choice` [R] is the argmax of `logits` [R, V]."""
    if all(r.params.greedy and not r.params.adjusted for r in requests):
        return verify_greedy(choice, proposal, torch.tensor(lengths, device=logits.device))
    if any(r.params.adjusted for r in requests):
        rows = list(logits.split([n + 1 for n in lengths]))
        for b, request in enumerate(requests):
            if request.params.adjusted:
                history = History(request.prompt_ids, request.new_ids)
                rows[b] = adjust(rows[b], proposal.tokens[b, : lengths[b]], history, request.params)
        logits = torch.cat(rows)
        choice = first_maximum(logits)[1]
    groups: dict[str, list[int]] = {}
    for b, request in enumerate(requests):
        groups.setdefault("greedy" if request.params.greedy else request.params.verifier, []).append(b)
    starts = [0, *accumulate(n + 1 for n in lengths)]
    count = torch.empty(len(requests), dtype=torch.long, device=logits.device)
    next_token = torch.empty_like(count)
    for kind, members in groups.items():
        own = torch.tensor([row for b in members for row in range(starts[b], starts[b + 1])], device=logits.device)
        sizes = torch.tensor([lengths[b] for b in members], device=logits.device)
        part = take(proposal, members)
        if kind == "greedy":
            accepted = verify_greedy(choice[own], part, sizes)
        else:
            settings = [requests[b].params for b in members for _ in range(lengths[b] + 1)]
            probs = distribution(logits[own], settings)
            verifier = verify_block if kind == "block" else verify_token
            accepted = verifier(probs, part, sizes, draws([requests[b] for b in members], part))
        index = torch.tensor(members, device=logits.device)
        count[index], next_token[index] = accepted.count, accepted.next_token
    return Accepted(count, next_token)


def draws(requests: Sequence[Request], proposal: Proposal) -> Draws:
    """This round's numbers of these requests, from their own streams."""
    seeds, positions = [r.seed for r in requests], [r.anchor_position for r in requests]
    device, slots = proposal.tokens.device, proposal.tokens.shape[1]
    accept = uniforms(seeds, positions, Stream.ACCEPT, slots)
    return Draws(accept.to(device), uniforms(seeds, positions, Stream.FINAL, 1)[:, 0].to(device))


def logprobs(logits: Tensor, ids: Sequence[int], best: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of one token per row of raw logits [T, V], each with the `best` largest of its row."""
    every = logits.log_softmax(-1)
    own = every.gather(1, torch.tensor(ids, device=logits.device)[:, None]).squeeze(1).tolist()
    values, tokens = every.topk(min(best, every.shape[-1]), -1)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, (row_ids, row_values) in zip(own, pairs, strict=True)
    )


def first_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its first index of every row [R, V]; NaN counts as largest. Decodes plainly and verifies.

    `Tensor.max` over a dimension is not vectorised on a CPU: the maximum of each chunk is, and leaves little to search.
    """
    rows, width = logits.shape
    if width % CHUNK:
        return torch.max(logits, -1)
    chunks = logits.view(rows, -1, CHUNK)
    best, chunk = chunks.amax(-1).max(-1)
    inside = chunks[torch.arange(rows, device=logits.device), chunk].argmax(-1)
    return best, chunk * CHUNK + inside


def _not_finite(model: str, request: Request, remedy: str) -> Verdict:
    fault = EngineFault(
        f"the {model} produced NaN or infinity at position {request.anchor_position}",
        "an argmax over them would look like a draft that is never accepted",
        remedy,
    )
    return Verdict((), -1, fault)
