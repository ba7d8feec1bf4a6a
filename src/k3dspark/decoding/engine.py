"""The batch engine: prefill in chunks, then rounds, for any number of requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch

from k3dspark.decoding.admission import Capacity
from k3dspark.decoding.params import SamplingParams, check_prompt, drawn_seed
from k3dspark.decoding.prefill import prefill
from k3dspark.decoding.prefix import prefix_cache
from k3dspark.decoding.request import FinishReason, Progress, Request, Result
from k3dspark.decoding.round import Pair, decode_round
from k3dspark.decoding.schedule import FullBlock, Scheduler
from k3dspark.decoding.stats import DecodeStats
from k3dspark.decoding.stops import StopStrings
from k3dspark.errors import BadInput, K3DSparkError
from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.protocol import Target


class Engine:
    """Decodes requests with a target and, when given, a draft at its side.

    Without a draft the same code decodes plainly, so the two are always compared on the same kernels. `exact` drafts
    for each request alone: with a target whose logits do not depend on how rows are batched, and verify lengths that
    do not depend on the load, a request then gives the same tokens alone and in any company. `draft_candidates`
    limits the draft's Markov loop to the best so many tokens of each slot. `decode` (ids to text) is needed for stop
    strings only. `capacity` limits what runs at once; the rest waits. `prefix_rows` tokens of finished work are kept
    for prompts that begin alike, as far as requests leave room in `capacity`. Raises `BadInput` when the draft was made
    for another target, or rows of the target cannot be kept.
    """

    def __init__(
        self,
        target: Target,
        draft: K3DSparkModel | None = None,
        scheduler: Scheduler | None = None,
        *,
        prefill_chunk: int = 256,
        draft_candidates: int | None = None,
        exact: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        capacity: Capacity | None = None,
        prefix_rows: int | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise BadInput(f"prefill_chunk is {prefill_chunk}", "a chunk holds at least one token", "pass 1 or more")
        if draft is not None:
            check_pair(target, draft)
        self._pair = Pair(target, draft, scheduler or FullBlock(), draft_candidates, isolate=exact)
        self._prefill_chunk = prefill_chunk
        self._decode = decode
        self._capacity = capacity or Capacity()
        self.prefix = prefix_cache(target, prefix_rows) if prefix_rows is not None else None
        self._block = draft.config.block_size if draft is not None else 0
        self._ids = count()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self.stats = DecodeStats()  # pooled over finished requests

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[tuple[int, ...], int]:
        """The prompt, and how many new tokens it leaves room for. Raises `BadInput`. For any thread."""
        target = self._pair.target
        prompt = check_prompt(prompt_ids, params, target.vocab_size, target.max_positions)
        limit = min(params.max_new_tokens, target.max_positions - len(prompt))
        self._capacity.check(len(prompt), limit)
        if params.stop_strings and self._decode is None:
            raise BadInput("stop_strings need text", "this engine was built without `decode`", "pass stop_token_ids")
        return prompt, limit

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a prompt; `step` moves it on. Raises `BadInput` before anything is allocated."""
        params = params or SamplingParams()
        prompt, limit = self.check(prompt_ids, params)
        request = Request(
            id=next(self._ids),
            prompt_ids=prompt,
            params=params,
            limit=limit,
            seed=drawn_seed() if params.seed is None else params.seed,
            stops=StopStrings(self._decode, params.stop_strings) if self._decode and params.stop_strings else None,
        )
        request.stats = DecodeStats.with_slots(self._block)
        request.stats.prompt_tokens = len(prompt)
        self._waiting.append(request)
        return request

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """One round of all running requests, then one chunk of waiting prompts.

        A long prompt thus delays the others by one chunk at a time, and its first token is out before it joins them.
        """
        for request in self._capacity.surplus(self._waiting, self._running, self._block):
            self._preempt(request)
        self._make_room()
        progress = decode_round(self._pair, self._running) if self._running else []
        self._release_finished()
        admitted = self._capacity.admit(self._waiting, self._running, self._block)
        if admitted:
            self._make_room(admitted)
            reserve = self._capacity.rows is None
            started = prefill(self._pair, admitted, self._prefill_chunk, reserve, self.prefix)
            for request in [p.request for p in started]:
                self._waiting.remove(request)
                self._running.append(request)
            for request in [p.request for p in started if p.request.error is None]:
                self._keep(request)  # those who wait with the same beginning must not run it again
            self._release_finished()
            progress += started
        return progress

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._waiting and not self._running

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without their first token, and those that were preempted; oldest first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that take part in the next round."""
        return tuple(self._running)

    @property
    def rows(self) -> int:
        """Target rows held now."""
        held = (r.handle for r in (*self._waiting, *self._running))
        return sum(self._pair.target.length(handle) for handle in held if handle is not None)

    def cancel(self, request: Request) -> None:
        """End a request now and free what it holds; a finished one is left as it is."""
        if not request.finished:
            request.finish_reason = FinishReason.CANCELLED
            self._release(request)

    def abort(self, error: K3DSparkError) -> None:
        """End every request with `error` and free what they hold: for a step that raised."""
        for request in (*self._waiting, *self._running):
            request.finish_reason, request.error = FinishReason.ERROR, error
            self._release(request)

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Decode one prompt, yielding the tokens of each round as they are committed."""
        return Stream(self, self.submit(prompt_ids, params))

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> Result:
        """Decode one prompt to its end. Raises the request's `EngineFault` if there was one."""
        stream = self.stream(prompt_ids, params)
        for _ in stream:
            pass
        return stream.result

    def _make_room(self, admitted: Sequence[Request] = ()) -> None:
        if self.prefix is not None:
            self.prefix.shrink(self._room(admitted))

    def _room(self, admitted: Sequence[Request] = ()) -> int | None:
        """Rows that requests leave free, with those of `admitted`, which are about to begin."""
        holders = {r for r in (*self._waiting, *self._running) if r.handle is not None}
        return self._capacity.spare([*holders, *(r for r in admitted if r.handle is None)], self._block)

    def _keep(self, request: Request) -> None:
        if self.prefix is not None:
            self.prefix.store(request, self._room())

    def _preempt(self, request: Request) -> None:
        """Free the target rows of a request and let it wait; its tokens, statistics and context rows stay."""
        assert request.handle is not None
        self._pair.target.close(request.handle)
        request.handle, request.prefilled = None, 0
        request.preemptions += 1
        if request in self._running:
            self._running.remove(request)
            self._waiting.append(request)
        self._waiting.sort(key=lambda r: r.id)

    def _release_finished(self) -> None:
        for request in [r for r in self._running if r.finished]:
            if request.error is None:
                self._keep(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        if request.handle is not None:
            self._pair.target.close(request.handle)
        request.handle = request.context = request.fresh_taps = None
        self.stats = self.stats + request.stats


class Stream:
    """Iterates over the newly committed tokens of one request; `result` is there once it is exhausted."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._seen = 0
        self.request = request

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[int, ...]:
        try:
            while len(self.request.new_ids) == self._seen and not self.request.finished:
                self._engine.step()
        except BaseException:
            self.close()
            raise
        fresh = tuple(self.request.new_ids[self._seen :])
        self._seen += len(fresh)
        if fresh:
            return fresh
        if self.request.error is not None:
            raise self.request.error
        raise StopIteration

    def close(self) -> None:
        """Give up before the end: the request is cancelled and its memory freed."""
        self._engine.cancel(self.request)

    @property
    def result(self) -> Result:
        """The finished generation. Raises `BadInput` while tokens are still to come."""
        request = self.request
        if request.finish_reason is None:
            raise BadInput("the stream is not exhausted", "the result is known at its end", "iterate to the end first")
        return Result(
            request.prompt_ids, tuple(request.new_ids), tuple(request.logprobs), request.finish_reason, request.stats
        )


def check_pair(target: Target, draft: K3DSparkModel) -> None:
    """Raise `BadInput` unless the draft reads this target's taps and speaks its vocabulary."""
    config = draft.config
    for name, of_draft, of_target in (
        ("tap layers", tuple(config.target_layer_ids), tuple(target.tap_layer_ids)),
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
    ):
        if of_draft != of_target:
            raise BadInput(
                f"the draft expects {name} {of_draft}, the target has {of_target}",
                "a draft works only with the target it was trained for",
                "load the target named by the draft's config.json, with its taps",
            )
