"""The real server around the real engine, with one fault planted in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from k3dspark.acceptance.server import Server, open_server
from k3dspark.decoding import FinishReason, FullBlock, Request, SamplingParams
from k3dspark.embedded.pair import ModelPair
from k3dspark.serving.server import EngineSettings
from k3dspark.serving.service import Service
from k3dspark.serving.settings import Settings
from serving.harness import running

Fault = Callable[[Service], None]


@contextmanager
def served(pair: ModelPair, fault: Fault = lambda _: None, *, concurrency: int = 2) -> Iterator[Server]:
    """A generator that asks a server of this pair, in which `fault` has been planted."""
    settings = Settings(running=8)
    with running(pair, settings, EngineSettings(FullBlock(), exact=True, prefix_rows=4096)) as started:
        fault(started.service)
        server = open_server(started.url, model=None, api_key=None, timeout_seconds=600, concurrency=concurrency)
        server.tokenizer = server.codec()
        try:
            yield server
        finally:
            server.close()


def temperature(value: float) -> Fault:
    """Requests that ask for greedy decoding are sampled."""

    def plant(service: Service) -> None:
        honest = service.sampling

        def sampling(*given: Any) -> SamplingParams:
            return replace(honest(*given), temperature=value, seed=None)

        service.sampling = sampling  # type: ignore[method-assign]

    return plant


def wrong_token(every: int, first: int) -> Fault:
    """Of all tokens that the engine commits, number `first` and every `every`-th after it is another one.

    The model goes on behind the wrong token, as it would behind a kernel's mistake.
    """
    count = 0

    def spoil(request: Request, commit: Callable[..., tuple[int, ...]], tokens: Sequence[int], scores: Any) -> Any:
        nonlocal count
        told = list(tokens)
        for place, token in enumerate(told):
            count += 1
            if count >= first and (count - first) % every == 0:
                told[place] = token - 1 if token > 0 else token + 1
                return commit(told[: place + 1], scores[: place + 1])
        return commit(told, scores)

    return lambda service: _at_commit(service, spoil)


def dropped_at_stop_string() -> Fault:
    """The token that completes a stop string is lost, and the text before it is not cut."""

    def drop(request: Request, commit: Callable[..., tuple[int, ...]], tokens: Sequence[int], scores: Any) -> Any:
        kept = commit(tokens, scores)
        if request.finish_reason is FinishReason.STOP and request.stops is not None and len(kept) > 0:
            request.new_ids.pop()
            if request.logprobs:
                request.logprobs.pop()
            return kept[:-1]
        return kept

    return lambda service: _at_commit(service, drop)


def _at_commit(service: Service, change: Callable[..., tuple[int, ...]]) -> None:
    """Stand between the verdict and the request."""
    engine = service.worker.engine
    honest = engine.submit

    def submit(*given: Any, **more: Any) -> Request:
        request = honest(*given, **more)
        commit = request.commit
        request.commit = lambda tokens, scores=(): change(request, commit, tokens, scores)  # type: ignore[method-assign]
        return request

    engine.submit = submit  # type: ignore[method-assign]
