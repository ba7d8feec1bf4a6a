"""POST /v1/chat/completions: bodies of its answers, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from k3dspark.serving.answer import ScoredToken
from k3dspark.serving.errors import invalid
from k3dspark.serving.generation import Generation, Namer
from k3dspark.serving.schemas import ChatRequest
from k3dspark.serving.service import Service
from k3dspark.serving.tokens import Tokens


async def begin(service: Service, body: ChatRequest) -> Generation:
    """Check, render the conversation, tokenize and submit. Raises `ApiError`."""
    service.check_open(body.model)
    _check_supported(body)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = service.sampling(body, asked, (body.top_logprobs or 0) if body.logprobs else None)
    turns = [message.turn for message in body.messages]
    return await service.begin(lambda: [service.tokens.encode_chat(turns)], params, body)


def _check_supported(body: ChatRequest) -> None:
    if body.tools or body.functions or body.tool_choice not in (None, "none", "auto"):
        raise invalid("tools are not supported", "tools")
    if body.response_format is not None and body.response_format.get("type", "text") != "text":
        raise invalid("only the response format 'text' is supported", "response_format")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")


def whole(service: Service, generation: Generation) -> dict[str, Any]:
    """The body of an answer that is not streamed; the generation is finished."""
    return {
        **_head(service, "chat.completion"),
        **generation.prompt_ids(0),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": logprobs(service.tokens, generation.namer, answer.scored),
                "finish_reason": answer.finish,
                **generation.ids(answer.token_ids),
            }
            for index, answer in enumerate(generation.answers)
        ],
        "usage": generation.usage(),
        "metrics": generation.metrics(),
    }


async def chunks(service: Service, body: ChatRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer: the role first, then pieces of content."""
    head = _head(service, "chat.completion.chunk")
    for index in range(len(generation.answers)):
        yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""}, None, None)]}
    async for index, piece in generation.pieces():
        delta = {"content": piece.text} if piece.text else {}
        choice = _delta(index, delta, logprobs(service.tokens, generation.namer, piece.scored), piece.finish)
        yield {**head, "choices": [choice | generation.ids(piece.token_ids)]}
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": generation.usage(), "metrics": generation.metrics()}


def _delta(index: int, delta: dict[str, str], scores: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}


def _head(service: Service, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model}


def logprobs(tokens: Tokens, name: Namer, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """The chat endpoint's shape: one entry a token; None when log-probabilities were not asked for."""
    if not scored:
        return None
    return {
        "content": [
            {
                **_named(tokens, name, s.token_id, s.score.logprob),
                "top_logprobs": [_named(tokens, name, token, value) for token, value in s.score.best],
            }
            for s in scored
        ],
        "refusal": None,
    }


def _named(tokens: Tokens, name: Namer, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": name(token_id), "logprob": logprob, "bytes": tokens.bytes_of(token_id)}
