"""What the server answers, for /openapi.json and for readers; the endpoints write these bodies themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int = Field(description="Tokens of prompt and answer together.")


class Models(BaseModel):
    object: str
    data: list[Model]


class PromptDetails(BaseModel):
    cached_tokens: int = Field(description="Rows that an earlier request had left.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Speculation(BaseModel):
    """Pooled over the choices of an answer."""

    rounds: int
    draft_tokens: int = Field(description="Draft tokens that the target verified.")
    accepted_tokens: int = Field(description="Of those, tokens in the output.")
    mean_acceptance_length: float = Field(description="1 + accepted / rounds: tokens a round, the bonus included.")
    draft_acceptance_rate: float = Field(description="accepted / verified.")
    accepted_per_slot: list[int]
    draft_seconds: float
    verify_seconds: float
    host_seconds: float


class RequestMetrics(BaseModel):
    time_to_first_token_seconds: float | None
    queue_seconds: float | None
    seconds: float
    speculative_decoding: Speculation


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class Completion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class ChatCompletion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    usage: Usage
    metrics: RequestMetrics


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str


_WORDS = {
    400: "The request cannot be served as it is.",
    401: "No valid API key.",
    404: "No such model or path.",
    405: "Another method is meant.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "Too many requests wait; see Retry-After.",
    500: "The engine failed.",
    503: "Shutting down, or the engine has stopped.",
    504: "The request took too long.",
    422: "Not used: what does not fit the schema is 400.",
}
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": Error, "description": w} for status, w in _WORDS.items()}
