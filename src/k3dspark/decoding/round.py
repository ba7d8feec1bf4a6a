"""One round of speculative decoding: extend context → propose → schedule → verify → accept → commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.nn.functional as F

from k3dspark.decoding.judge import Verdict, judge
from k3dspark.decoding.request import FinishReason, Progress, Request
from k3dspark.decoding.schedule import Load, Outcome, Scheduler
from k3dspark.decoding.streams import Stream, coarse_uniforms
from k3dspark.decoding.verify import join, take
from k3dspark.errors import EngineFault
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling, Proposal
from k3dspark.target.protocol import RaggedRows, Target

TILE = 8  # rows of a call of the draft's context projection where bits matter


@dataclass(frozen=True)
class Pair:
    """A target, the draft at its side (None: plain decoding through the same code), and the rule for lengths."""

    target: Target
    draft: K3DSparkModel | None
    scheduler: Scheduler
    candidates: int | None = None  # the draft's Markov loop keeps this many base logits per slot; None: all
    isolate: bool = False  # draft for each request alone: its block then cannot depend on its neighbours' shapes

    def context_rows(self, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Context rows [L, T, W] of taps [T, N*d] at positions [T], which are consecutive when `isolate`d.

        Kernels are chosen by shape. In tiles of one shape a row has the same bits however many rows came with it: it
        may be computed in a prefill or in a round, and kept for another request.
        """
        assert self.draft is not None
        if not self.isolate:
            return self.draft.context_rows(taps, positions)
        tiles = []
        for low in range(0, len(taps), TILE):
            part = taps[low : low + TILE]
            tile = F.pad(part, (0, 0, 0, TILE - len(part)))
            places = torch.arange(TILE, device=positions.device) + positions[low]
            tiles.append(self.draft.context_rows(tile, places)[:, : len(part)])
        return torch.cat(tiles, 1)

    def groups(self, requests: Sequence[Request]) -> list[Sequence[Request]]:
        """Requests that share one pass of the draft."""
        return [[r] for r in requests] if self.isolate else [requests]


def decode_round(pair: Pair, requests: Sequence[Request]) -> list[Progress]:
    """Move every request on by 1 … K+1 tokens with one draft pass and one target pass."""
    started = perf_counter()
    extend_context(pair, requests)
    check_aligned(pair, requests)
    load = before_draft(pair, requests)
    proposal = propose(pair, requests, load)
    lengths = pair.scheduler.lengths(proposal.confidence, load)
    rows = block_rows(requests, proposal, lengths)
    drafted = perf_counter()

    output = pair.target.forward(rows)
    verdicts = judge(output.logits, proposal, lengths, requests)  # the round's one synchronisation with the host
    verified = perf_counter()

    kept = [accept(request, verdict) for request, verdict in zip(requests, verdicts, strict=True)]
    accepted = perf_counter()
    commit(pair, requests, kept, rows, output.taps)

    draft_seconds, host_seconds = drafted - started, accepted - verified
    verify_seconds = perf_counter() - drafted - host_seconds  # rolling back belongs to verifying
    for request in requests:
        request.stats.add_times(draft_seconds, verify_seconds, host_seconds)
    counts = tuple(len(v.accepted) for v in verdicts)
    pair.scheduler.observe(Outcome(load, lengths, counts, draft_seconds, verify_seconds))
    return [Progress(request, tokens) for request, tokens in zip(requests, kept, strict=True)]


def extend_context(pair: Pair, requests: Sequence[Request]) -> None:
    """Turn the taps of newly committed rows into context rows, one projection for all requests."""
    waiting = [r for r in requests if r.fresh_taps is not None]
    if pair.draft is None or not waiting:
        return
    for group in pair.groups(waiting):
        waits = [(r, r.context, r.fresh_taps) for r in group if r.context is not None and r.fresh_taps is not None]
        taps = torch.cat([t for _, _, t in waits])
        positions = torch.cat([torch.arange(c.length, c.length + len(t)) for _, c, t in waits])
        rows = pair.context_rows(taps, positions.to(taps.device))  # [L, T, W]
        for (request, context, _), part in zip(waits, rows.split([len(t) for _, _, t in waits], 1), strict=True):
            context.append(part)
            request.fresh_taps = None


def check_aligned(pair: Pair, requests: Sequence[Request]) -> None:
    """len(context rows) == len(target cache) == position of the anchor, or the draft silently loses acceptance."""
    for request in requests:
        assert request.handle is not None
        held = pair.target.length(request.handle)
        rows = held if request.context is None else request.context.length
        if not rows == held == request.anchor_position:
            raise EngineFault(
                f"request {request.id} has {rows} context rows and {held} target rows at position "
                f"{request.anchor_position}",
                "the three must be equal before every round",
                "this is a defect of the engine or of the target's rollback; please report it",
            )


def before_draft(pair: Pair, requests: Sequence[Request]) -> Load:
    """What is known before anything is drawn; requests that are not worth a draft get a limit of 0."""
    block = pair.draft.config.block_size if pair.draft is not None else 0
    # One token is committed besides the accepted ones, so a budget of 1 leaves nothing to draft.
    limits = tuple(min(block, r.remaining - 1) for r in requests)
    load = Load(
        requests=tuple(r.id for r in requests),
        contexts=tuple(r.anchor_position for r in requests),
        limits=limits,
        settings=tuple(r.setting for r in requests),
    )
    if not any(limits):
        return load
    wanted = pair.scheduler.wants_draft(load)
    return replace(load, limits=tuple(n if w else 0 for n, w in zip(limits, wanted, strict=True)))


def propose(pair: Pair, requests: Sequence[Request], load: Load) -> Proposal:
    """One block per request with a limit above 0; the rows of the others are filler that nothing verifies."""
    chosen = [i for i, limit in enumerate(load.limits) if limit > 0]
    if pair.draft is None or not chosen:
        return no_draft(len(requests))
    drafted = [requests[i] for i in chosen]
    sampled = not all(r.params.greedy for r in drafted)  # one greedy row among others has one-hot probabilities
    parts = [draft_block(pair.draft, group, pair.candidates, sampled) for group in pair.groups(drafted)]
    proposal = parts[0] if len(parts) == 1 else join(parts)
    if len(chosen) == len(requests):
        return proposal
    row_of = {request: row for row, request in enumerate(chosen)}
    return take(proposal, [row_of.get(b, 0) for b in range(len(requests))])


def draft_block(draft: K3DSparkModel, requests: Sequence[Request], candidates: int | None, sampled: bool) -> Proposal:
    """One pass of the draft, at each request's own temperature: there it agrees most with the target (spec B.3)."""
    positions = [r.anchor_position for r in requests]
    sampling = DraftSampling(candidates=candidates)
    if sampled:
        numbers = coarse_uniforms([r.seed for r in requests], positions, Stream.DRAFT, draft.config.block_size)
        sampling = DraftSampling(torch.tensor([r.params.temperature for r in requests]), numbers, candidates)
    return draft.propose(
        [context for r in requests if (context := r.context) is not None],
        torch.tensor([r.anchor for r in requests]),
        torch.tensor(positions),
        sampling,
    )


def no_draft(batch: int) -> Proposal:
    """A block of no slots: verification of it is plain decoding."""
    return Proposal(torch.empty(batch, 0, dtype=torch.long), torch.empty(batch, 0))


def block_rows(requests: Sequence[Request], proposal: Proposal, lengths: Sequence[int]) -> RaggedRows:
    """The target's input: each request's anchor followed by the draft tokens to verify."""
    width = proposal.tokens.shape[1] + 1
    anchors = torch.tensor([[r.anchor] for r in requests], device=proposal.tokens.device)
    tokens = torch.cat([anchors, proposal.tokens], 1).flatten()  # [B * (K+1)]
    if any(length + 1 < width for length in lengths):
        picked = [b * width + i for b, length in enumerate(lengths) for i in range(length + 1)]
        tokens = tokens[torch.tensor(picked, device=tokens.device)]
    handles = tuple(r.handle for r in requests if r.handle is not None)
    return RaggedRows(handles, tuple(n + 1 for n in lengths), tokens)


def accept(request: Request, verdict: Verdict) -> tuple[int, ...]:
    """Add the verdict's tokens to the request, as far as its stop tokens and its limit let them in."""
    if verdict.fault is not None:
        request.error, request.finish_reason = verdict.fault, FinishReason.ERROR
        return ()
    return request.commit((*verdict.accepted, verdict.next_token), verdict.logprobs)


def commit(
    pair: Pair, requests: Sequence[Request], kept: Sequence[tuple[int, ...]], rows: RaggedRows, taps: torch.Tensor
) -> None:
    """Keep the target rows of committed tokens and their taps [R, N*d]; roll back all others."""
    first = 0
    for request, tokens, length in zip(requests, kept, rows.lengths, strict=True):
        if tokens:
            request.stats.add_round(length - 1, len(tokens) - 1)
        if not request.finished and request.handle is not None:
            # As many rows as tokens: the anchor's row is new, the last token's is still to come.
            pair.target.commit(request.handle, len(tokens))
            request.fresh_taps = taps[first : first + len(tokens)] if pair.draft is not None else None
        first += length
