"""One choice of an answer while it grows: text without half a character, and log-probabilities beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3dspark.decoding import FinishReason, SamplingParams, TokenLogprob
from k3dspark.decoding.stops import StopFilter
from k3dspark.decoding.text import TextStream
from k3dspark.serving.worker import Event


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability, and where its text begins in the answer."""

    token_id: int
    score: TokenLogprob
    offset: int


@dataclass(frozen=True)
class Piece:
    """What one event adds; `finish` is "stop" or "length" at the end. `token_ids` are all since the last piece."""

    text: str = ""
    scored: tuple[ScoredToken, ...] = ()
    finish: str | None = None
    token_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.scored or self.finish)


class Answer:
    """Turns the events of one job into pieces and keeps their sum."""

    def __init__(self, decode: Callable[[Sequence[int]], str], params: SamplingParams, echo: str = "") -> None:
        self._stream = TextStream(decode)
        self._filter = StopFilter(params.stop_strings)
        self._stop_ids = params.stop_token_ids
        self._echo = echo
        self._seen = len(echo)  # characters of text, the held back ones included
        self.text = ""
        self.scored: tuple[ScoredToken, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self._sent = 0  # of `token_ids`
        self.finish: str | None = None

    def push(self, event: Event) -> Piece:
        """The text that `event` makes certain; every token is scored, those of a stop string too."""
        shown, self._echo = self._echo, ""
        scored: list[ScoredToken] = []
        for index, token in enumerate(event.token_ids):
            if event.logprobs:
                scored.append(ScoredToken(token, event.logprobs[index], self._seen))
            ends = event.reason is FinishReason.STOP and index == len(event.token_ids) - 1
            if not (ends and token in self._stop_ids):  # the token that ends the answer has no text
                shown += self._show(self._stream.push((token,)))
        if event.reason is not None:
            shown += self._show(self._stream.finish())
            if not self._filter.stopped:
                shown += self._filter.finish()
            self.finish = "stop" if event.reason is FinishReason.STOP else "length"
        self.token_ids += event.token_ids
        self.text += shown
        self.scored += tuple(scored)
        piece = Piece(shown, tuple(scored), self.finish, self.token_ids[self._sent :])
        if piece:
            self._sent = len(self.token_ids)
        return piece

    @property
    def tokens(self) -> int:
        """How many there are, those without text included."""
        return len(self.token_ids)

    def _show(self, piece: str) -> str:
        self._seen += len(piece)
        return self._filter.push(piece)
