"""Stop strings: where in a token stream the output ends, and what of its text may be shown meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3dspark.decoding.text import TextStream


class StopStrings:
    """Watches one request's tokens for strings that may span several of them."""

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._text = TextStream(decode)
        self._filter = StopFilter(strings)

    def push(self, token_id: int) -> bool:
        """Whether the text up to and including this token contains a stop string."""
        self._filter.push(self._text.push((token_id,)))
        return self._filter.stopped


class StopFilter:
    """Passes text on until a stop string begins; text that may be the beginning of one is held back.

    The stop string and what follows it never come out.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain to come before any stop string."""
        if self.stopped:
            return ""
        self._held += piece
        starts = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if starts:
            self.stopped = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._strings), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, when the output ends without a stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper prefix of `string` that `text` ends with."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
