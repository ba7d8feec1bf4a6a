"""What a caller may ask of one generation, checked before any work is done."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

from k3dspark.errors import BadInput

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (spec D.2)
SEEDS = 2**64
MOST_TOP_K = 2**31 - 1  # more than any vocabulary holds, and no tensor of indices overflows


def drawn_seed() -> int:
    """A seed for a request without one; every signed 64-bit field, option or JSON reader can give it back."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class SamplingParams:
    """Limits and sampling of one request. Raises `BadInput` naming the field that is wrong.

    `max_new_tokens` counts the first token. `stop_token_ids` and `stop_strings` end the output; the stop token, or the
    token that completes the string, is its last. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    Presence and frequency count generated tokens, repetition the prompt too. `seed` None draws one. `logprobs` asks
    for the log-probability of every token and of the n best beside it, before any of the processing above. Cached
    prefixes are shared only among requests of one `cache_salt`.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    verifier: Literal["block", "token"] = "block"
    cache_salt: str = ""

    def __post_init__(self) -> None:
        self._require("max_new_tokens", _integer(self.max_new_tokens, 1), "at least one token must be asked for")
        self._require("temperature", _number(self.temperature, 0), "it must be a number from 0")
        self._require(
            "top_k", _integer(self.top_k, 0, MOST_TOP_K), "it must be a whole number from 0, which is off, to 2^31 - 1"
        )
        self._require("top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "it must be above 0 and at most 1")
        self._require("min_p", _number(self.min_p, 0, 1) and self.min_p < 1, "it must be from 0 and below 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, _number(getattr(self, name)), "it must be a finite number")
        self._require(
            "repetition_penalty",
            _number(self.repetition_penalty, 0) and self.repetition_penalty > 0,
            "it must be a number above 0, 1 for off",
        )
        self._require("logit_bias", all(_number(b) for b in self.logit_bias.values()), "biases must be finite numbers")
        self._require("seed", self.seed is None or _integer(self.seed, 0, SEEDS - 1), "it must be from 0 to 2^64 - 1")
        self._require("logprobs", self.logprobs is None or _integer(self.logprobs, 0), "it must be a count from 0")
        self._require("verifier", self.verifier in ("block", "token"), "known verifiers are block and token")
        self._require(
            "stop_strings",
            not isinstance(self.stop_strings, str) and all(isinstance(s, str) and s for s in self.stop_strings),
            "it must be a list of strings that are not empty",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        """Whether tokens can be cut from the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def adjusted(self) -> bool:
        """Whether logits depend on history or bias, not on the model alone."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.logit_bias)

    def _require(self, name: str, holds: bool, why: str) -> None:
        if not holds:
            raise BadInput(f"{name} is {getattr(self, name)!r}", why, f"correct {name}")


def check_prompt(
    prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_positions: int
) -> tuple[int, ...]:
    """The prompt as a tuple. Raises `BadInput` when it is empty, too long, or holds ids outside the vocabulary."""
    try:
        prompt = tuple(index(token) for token in prompt_ids)
    except TypeError as error:
        raise BadInput("the prompt is not a list of token ids", str(error), "tokenize it first") from error
    if not prompt:
        raise BadInput("the prompt is empty", "decoding starts from at least one token", "pass a prompt")
    if len(prompt) >= max_positions:
        raise BadInput(
            f"the prompt has {len(prompt)} tokens",
            f"the model's context holds {max_positions} tokens, of which at least one must be new",
            f"shorten the prompt to at most {max_positions - 1} tokens",
        )
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), vocab_size)
    return prompt


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise BadInput(
            f"{name} contains token id {wrong}",
            f"ids of this model go from 0 to {vocab_size - 1}",
            "use the tokenizer that belongs to the model",
        )


def _integer(value: Any, low: int, high: int | None = None) -> bool:
    return type(value) is int and low <= value and (high is None or value <= high)


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    # bool is an int to Python, but never a number that a caller meant.
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high
