"""What the endpoints share: the model, its limits, and the way from a request body to a generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from k3dspark.decoding import SamplingParams
from k3dspark.decoding.params import SEEDS
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput
from k3dspark.serving import errors
from k3dspark.serving.generation import Generation, check_choices
from k3dspark.serving.metrics import Metrics
from k3dspark.serving.schemas import GenerationRequest
from k3dspark.serving.settings import Settings
from k3dspark.serving.tokens import Tokens
from k3dspark.serving.worker import Worker

ENCODERS = 2
LEAST_TOP_P = 1e-6  # the best token alone, as anything smaller; not yet 0 in fp32
Value = TypeVar("Value", int, float)


class Service:
    """One served model. `draining` is set by the first SIGTERM."""

    def __init__(self, pair: ModelPair, worker: Worker, metrics: Metrics, settings: Settings) -> None:
        self.worker, self.metrics, self.settings = worker, metrics, settings
        self.tokens = Tokens(pair)
        self.model = settings.model_name or pair.name
        self.max_positions, self.vocab_size = pair.target.max_positions, pair.target.vocab_size
        self.created = int(time.time())
        self.draining = False
        # Few threads of its own: every thread that ever tokenized keeps the tokenizer's caches.
        self.encoders = ThreadPoolExecutor(ENCODERS, "k3dspark-tokenizer")
        self._stop_ids = pair.stop_ids

    def check_open(self, model: str | None = None) -> None:
        """Raise `ApiError` unless a new request may come in now."""
        if not self.worker.alive:
            raise errors.stopped()
        if self.draining:
            raise errors.draining()
        if model is not None and model != self.model:
            raise errors.ApiError(
                404, f"the model {model!r} is not served here; this is {self.model!r}", "invalid_request_error",
                "model", "model_not_found",
            )  # fmt: skip

    def sampling(self, body: GenerationRequest, new_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; `new_tokens` None asks for as many as the server and the context allow."""
        most, defaults = self.settings.limits.new_tokens, self.settings.defaults
        if new_tokens is not None and most is not None and new_tokens > most:
            raise errors.invalid(f"{new_tokens} tokens asked for; this server gives up to {most}", "max_tokens")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > self.settings.limits.stops:
            raise errors.invalid(f"{len(stops)} stop strings; up to {self.settings.limits.stops} are allowed", "stop")
        try:
            return SamplingParams(
                max_new_tokens=new_tokens or most or self.max_positions,
                stop_token_ids=(*(() if body.ignore_eos else self._stop_ids), *(body.stop_token_ids or ())),
                stop_strings=tuple(stops),
                temperature=_first(body.temperature, defaults.temperature),
                top_p=max(_first(body.top_p, defaults.top_p), LEAST_TOP_P),
                top_k=max(_first(body.top_k, defaults.top_k), 0),
                min_p=_first(body.min_p, defaults.min_p),
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                repetition_penalty=_first(body.repetition_penalty, 1.0),
                logit_bias=_bias(body.logit_bias or {}),
                seed=None if body.seed is None else body.seed % SEEDS,
                logprobs=logprobs,
                verifier=defaults.verifier,
                cache_salt=body.cache_salt or "",
            )
        except BadInput as error:
            raise errors.refused(error) from error

    async def begin(
        self,
        encode: Callable[[], Sequence[Sequence[int]]],
        params: SamplingParams,
        body: GenerationRequest,
        echoes: Sequence[str] = (),
    ) -> Generation:
        """Tokenize and submit. Raises `ApiError` for prompts that do not fit, and when too many requests wait."""
        limits = self.settings.limits
        try:
            encoded = await asyncio.get_running_loop().run_in_executor(self.encoders, encode)
            check_choices(len(encoded), body.n, limits.choices)
            for prompt in encoded:
                if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
                    raise errors.invalid(
                        f"the prompt has {len(prompt)} tokens; this server takes up to {limits.prompt_tokens}",
                        "prompt", "context_length_exceeded",
                    )  # fmt: skip
            prompts = [self.worker.engine.check(prompt, params)[0] for prompt in encoded]
        except BadInput as error:
            raise errors.refused(error) from error
        self.check_open()  # tokenizing took time
        waiting = len(self.worker.jobs) + len(prompts) * body.n - self.settings.running
        if waiting > limits.queue:
            raise errors.busy(max(len(self.worker.jobs) - self.settings.running, 0))
        return Generation(
            self.worker, self.tokens, prompts, params, body.n, echoes,
            token_ids=bool(body.return_token_ids), number_tokens=bool(body.return_tokens_as_token_ids),
        )  # fmt: skip


def _first(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise errors.invalid(f"logit_bias has the key {token!r}, which is no token id", "logit_bias")
        if not -100 <= value <= 100:
            raise errors.invalid(f"logit_bias of token {token} is {value}; it must be from -100 to 100", "logit_bias")
        bias[int(token)] = value
    return bias
