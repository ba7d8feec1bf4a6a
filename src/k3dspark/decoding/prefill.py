"""Prompts in chunks: target rows, context rows, and the first token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter

import torch

from k3dspark.decoding.judge import judge
from k3dspark.decoding.request import Progress, Request
from k3dspark.decoding.round import Pair, accept, extend_context, no_draft
from k3dspark.target.protocol import RaggedRows


def prefill(pair: Pair, waiting: Sequence[Request], chunk: int) -> list[Progress]:
    """Run the next chunk of the oldest waiting prompt, and of the ones after it as long as `chunk` rows hold them.

    A prompt is always cut at multiples of `chunk`, whoever runs beside it. The last row of a prompt gives the first
    token, which becomes the anchor; these requests are in the result.
    """
    started = perf_counter()
    requests, lengths = choose(waiting, chunk)
    for request in requests:
        if request.handle is None:
            request.handle = pair.target.open(len(request.prompt_ids) + request.limit)
            request.context = pair.draft.new_cache() if pair.draft is not None else None
    ids = [t for r, n in zip(requests, lengths, strict=True) for t in r.prompt_ids[r.prefilled : r.prefilled + n]]
    ends = list(accumulate(lengths))
    done = [r.prefilled + n == len(r.prompt_ids) for r, n in zip(requests, lengths, strict=True)]
    last_rows = [end - 1 for end, complete in zip(ends, done, strict=True) if complete]
    handles = tuple(r.handle for r in requests if r.handle is not None)
    output = pair.target.forward(
        RaggedRows(handles, lengths, torch.tensor(ids), torch.tensor(last_rows, dtype=torch.long))
    )

    for request, length, end in zip(requests, lengths, ends, strict=True):
        assert request.handle is not None
        pair.target.commit(request.handle, length)
        request.prefilled += length
        request.fresh_taps = output.taps[end - length : end] if pair.draft is not None else None
    extend_context(pair, requests)
    complete = [request for request, is_done in zip(requests, done, strict=True) if is_done]
    progress = []
    if complete:
        verdicts = judge(output.logits, no_draft(len(complete)), (0,) * len(complete), complete)
        progress = [Progress(r, accept(r, verdict)) for r, verdict in zip(complete, verdicts, strict=True)]
    seconds = perf_counter() - started
    for request in requests:
        request.stats.prefill_seconds += seconds
    return progress


def choose(waiting: Sequence[Request], chunk: int) -> tuple[list[Request], tuple[int, ...]]:
    """The oldest request and those after it whose next chunk still fits into `chunk` rows, and their chunk lengths."""
    chosen: list[Request] = []
    lengths: list[int] = []
    for request in waiting:
        length = min(chunk, len(request.prompt_ids) - request.prefilled)
        if sum(lengths) + length > chunk:
            break
        chosen.append(request)
        lengths.append(length)
    return chosen, tuple(lengths)
