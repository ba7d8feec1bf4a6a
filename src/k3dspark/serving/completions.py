"""POST /v1/completions: bodies of its answers, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from k3dspark.serving.answer import ScoredToken
from k3dspark.serving.errors import invalid
from k3dspark.serving.generation import Generation, Namer
from k3dspark.serving.schemas import CompletionRequest
from k3dspark.serving.service import Service

MAX_TOKENS = 16  # OpenAI's default for this endpoint


async def begin(service: Service, body: CompletionRequest) -> Generation:
    """Check, tokenize and submit. Raises `ApiError`."""
    service.check_open(body.model)
    if body.suffix:
        raise invalid("suffix is not supported", "suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise invalid("best_of is not supported; use n", "best_of")
    if body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not supported", "echo")
    usual = min(MAX_TOKENS, service.settings.limits.new_tokens or MAX_TOKENS)
    params = service.sampling(body, body.max_tokens or usual, body.logprobs)
    prompts = _prompts(body)
    tokens = service.tokens

    def encode() -> list[Sequence[int]]:
        return [tokens.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    echoes = [p if isinstance(p, str) else tokens.text(_known(p, service)) for p in prompts] if body.echo else []
    return await service.begin(encode, params, body, echoes)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if not isinstance(part, int)]


def _known(ids: list[int], service: Service) -> list[int]:
    """Ids that have a text; the engine refuses the request for the others."""
    return [token for token in ids if 0 <= token < service.vocab_size]


def whole(service: Service, generation: Generation) -> dict[str, Any]:
    """The body of an answer that is not streamed; the generation is finished."""
    return {
        **_head(service),
        "choices": [
            _choice(index, answer.text, logprobs(generation.namer, answer.scored), answer.finish)
            | generation.ids(answer.token_ids)
            | generation.prompt_ids(index)
            for index, answer in enumerate(generation.answers)
        ],
        "usage": generation.usage(),
        "metrics": generation.metrics(),
    }


async def chunks(service: Service, body: CompletionRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer."""
    head = _head(service)
    async for index, piece in generation.pieces():
        choice = _choice(index, piece.text, logprobs(generation.namer, piece.scored), piece.finish)
        yield {**head, "choices": [choice | generation.ids(piece.token_ids)]}
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": generation.usage(), "metrics": generation.metrics()}


def _head(service: Service) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.model}  # fmt: skip


def _choice(index: int, text: str, scores: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}


def logprobs(name: Namer, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """The completions endpoint's shape: parallel lists; None when log-probabilities were not asked for."""
    if not scored:
        return None
    return {
        "tokens": [name(s.token_id) for s in scored],
        "token_logprobs": [s.score.logprob for s in scored],
        "top_logprobs": [{name(token): value for token, value in s.score.best} for s in scored],
        "text_offset": [s.offset for s in scored],
    }
