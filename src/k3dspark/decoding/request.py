"""One generation on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import torch

from k3dspark.decoding.calibration import Setting
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.stats import DecodeStats
from k3dspark.decoding.stops import StopStrings
from k3dspark.errors import K3DSparkError
from k3dspark.model.cache import LatentCache


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token before any sampling, and the best alternatives (id, log-probability), best first."""

    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and the tokens committed so far.

    The last committed token is the anchor: sampled, but not yet an input of the target. Its position is the number of
    rows that the target's cache and the draft's context hold.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    limit: int  # most new tokens: the asked number, cut to the context window
    seed: int = 0
    stops: StopStrings | None = None
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per new token, if asked for
    finish_reason: FinishReason | None = None
    error: K3DSparkError | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    preemptions: int = 0  # times its target rows were freed to make room for older requests

    # State of the engine, freed when the request ends.
    handle: int | None = None  # the target's sequence
    prefilled: int = 0  # of `fill_length`, rows the target has run since the handle was opened
    context: LatentCache | None = None
    fresh_taps: torch.Tensor | None = None  # [T, N*d] of committed rows that are not yet in `context`

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @cached_property
    def setting(self) -> str:
        """The sampling setting by which the draft's confidence is calibrated."""
        return Setting.of(self.params).key

    @property
    def anchor(self) -> int:
        return self.new_ids[-1]

    @property
    def anchor_position(self) -> int:
        return len(self.prompt_ids) + len(self.new_ids) - 1

    @property
    def fill_length(self) -> int:
        """Target rows that must be there before a round: the prompt's, and those of new tokens but the anchor."""
        return len(self.prompt_ids) + max(len(self.new_ids) - 1, 0)

    def fill_ids(self, first: int, count: int) -> list[int]:
        """Tokens of rows `first` … `first + count - 1` of the fill."""
        return [*self.prompt_ids, *self.new_ids[:-1]][first : first + count]

    @property
    def remaining(self) -> int:
        """New tokens still allowed."""
        return self.limit - len(self.new_ids)

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> tuple[int, ...]:
        """Append `tokens` up to the first that stops the output or the limit; returns what was kept."""
        kept: list[int] = []
        for token in tokens[: self.remaining]:
            kept.append(token)
            # Short-circuits on purpose: the text of a stop token must not reach the stop strings.
            if token in self.params.stop_token_ids or (self.stops is not None and self.stops.push(token)):
                self.finish_reason = FinishReason.STOP
                break
        self.new_ids += kept
        self.logprobs += logprobs[: len(kept)]
        self.stats.new_tokens += len(kept)
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return tuple(kept)


@dataclass(frozen=True)
class Progress:
    """Tokens that one step committed for one request."""

    request: Request
    new_ids: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stats: DecodeStats
