"""What a generator is asked and what it answers, the same for local engines and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

TOP = 5  # best tokens asked for beside each token of the answer


class Source(StrEnum):
    """Where the token ids of an answer come from, best first."""

    IDS = "ids"  # the engine's own list
    LOGPROBS = "logprobs"  # names of tokens in its log-probabilities, turned into ids
    TEXT = "text"  # its text, tokenized again: two token sequences can share a text


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Question:
    """One request. Exactly one of `token_ids`, `text` and `messages` is given.

    `salt` keeps a prefix cache apart where the server knows such a thing: equal salts may share, others never do.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    sampling: Sampling = Sampling()
    top: int | None = TOP  # None: no log-probabilities
    salt: str | None = None


@dataclass(frozen=True)
class Scores:
    """Log-probability (natural) of the token that was chosen, and of the best ones, best first."""

    chosen: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answer:
    """What came back. `scores` has one entry per token, or none; `prompt_ids` and `cached` are None if not told."""

    token_ids: tuple[int, ...]
    text: str
    finish: str  # "stop" or "length"
    source: Source
    scores: tuple[Scores, ...] = ()
    prompt_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    cached: int | None = None  # prompt tokens that came from the prefix cache


class Codec(Protocol):
    """A tokenizer, wherever it lives."""

    @property
    def origin(self) -> str:
        """Where it came from, for the report."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text to be continued, special tokens in front included."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""

    def id_of(self, name: str) -> int | None:
        """The id of a token by the name that servers give it, or None when no single token has it."""


class Generator(Protocol):
    """A side of the comparison."""

    name: str  # for people: a model and where it runs
    kind: str  # "local", "k3dspark", "vllm", "sglang", "openai"
    context: int | None  # tokens of prompt and answer together; None: not told
    has_cache: bool | None  # whether prompts may come from a prefix cache; None: not known
    chats: bool  # whether it renders conversations

    def codec(self) -> Codec | None:
        """Its tokenizer, if it can lend one."""

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions, which run together. Raises `EngineFault`, `BadInput`."""

    def close(self) -> None:
        """Free what it holds."""
