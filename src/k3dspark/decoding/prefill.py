"""Prompts in chunks: target rows, context rows, and the first token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter

import torch

from k3dspark.decoding.judge import judge
from k3dspark.decoding.prefix import BLOCK, Block, PrefixCache
from k3dspark.decoding.request import Progress, Request
from k3dspark.decoding.round import Pair, accept, extend_context, no_draft
from k3dspark.target.protocol import RaggedRows


def prefill(
    pair: Pair, waiting: Sequence[Request], chunk: int, reserve: bool = True, prefix: PrefixCache | None = None
) -> list[Progress]:
    """Run the next chunk of the oldest waiting prompt, and of the ones after it as long as `chunk` rows hold them.

    A prompt is always cut at `chunk` rows from where `prefix` ends for it, whoever runs beside it. The last row of a
    prompt gives the first token, which becomes the anchor; these requests are in the result. So are those that come
    back from preemption, without new tokens: they had their anchor before. `reserve` makes room for the whole answer at
    once.
    """
    started = perf_counter()
    requests, lengths = choose(pair, waiting, chunk, reserve, prefix)
    ids = [t for r, n in zip(requests, lengths, strict=True) for t in r.fill_ids(r.prefilled, n)]
    ends = list(accumulate(lengths))
    done = [r.prefilled + n == r.fill_length for r, n in zip(requests, lengths, strict=True)]
    last_rows = [e - 1 for e, r, complete in zip(ends, requests, done, strict=True) if complete and not r.new_ids]
    handles = tuple(r.handle for r in requests if r.handle is not None)
    output = pair.target.forward(
        RaggedRows(handles, lengths, torch.tensor(ids), torch.tensor(last_rows, dtype=torch.long))
    )

    for request, length, end in zip(requests, lengths, ends, strict=True):
        assert request.handle is not None
        pair.target.commit(request.handle, length)
        request.prefilled += length
        missing = request.prefilled - request.context.length if request.context is not None else 0
        if missing > 0 and not request.new_ids:  # not again for rows run before a preemption
            request.fresh_taps = output.taps[end - missing : end]
    extend_context(pair, requests)
    complete = [request for request, is_done in zip(requests, done, strict=True) if is_done]
    progress = [Progress(r, ()) for r in complete if r.new_ids]
    fresh = [r for r in complete if not r.new_ids]
    if fresh:
        verdicts = judge(output.logits, no_draft(len(fresh)), (0,) * len(fresh), fresh)
        progress += [Progress(r, accept(r, verdict)) for r, verdict in zip(fresh, verdicts, strict=True)]
    seconds = perf_counter() - started
    for request in requests:
        request.stats.prefill_seconds += seconds
    return progress


def choose(
    pair: Pair, waiting: Sequence[Request], chunk: int, reserve: bool, prefix: PrefixCache | None
) -> tuple[list[Request], tuple[int, ...]]:
    """The oldest request and those after it whose next chunk still fits into `chunk` rows, and their chunk lengths.

    Sequences are opened for them, with what `prefix` has of their beginnings.
    """
    chosen: list[Request] = []
    lengths: list[int] = []
    for request in waiting:
        # Only now, not when it came: the request before it may have left this prefix.
        blocks: list[Block] = []
        if prefix is not None and request.handle is None:
            blocks = prefix.match(request.fill_ids(0, request.fill_length), request.params.cache_salt)
        length = min(chunk, request.fill_length - request.prefilled - BLOCK * len(blocks))
        if sum(lengths) + length > chunk:
            break
        if request.handle is None:
            request.handle = pair.target.open(len(request.prompt_ids) + request.limit if reserve else 0)
            if request.context is None and pair.draft is not None:
                request.context = pair.draft.new_cache()
            if prefix is not None:
                prefix.restore(request, blocks)
        chosen.append(request)
        lengths.append(length)
    return chosen, tuple(lengths)
