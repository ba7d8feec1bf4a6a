"""Text of a token stream, piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns committed tokens into text whose pieces add up to the text of all tokens.

    A character may span several tokens, and a tokenizer may decode a token differently at the start of a text. So
    each piece is the difference between decoding a short window with and without the new tokens, and it is held back
    while it ends inside a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of token ids, without special tokens and without tidying up spaces."""
        self._decode = decode
        self._window: list[int] = []  # the tokens of the last piece, then those not yet turned into text
        self._shown = 0  # of the window, tokens whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens; may be empty."""
        self._window += token_ids
        piece = self._piece()
        # A trailing U+FFFD is how an unfinished byte sequence decodes.
        return "" if piece.endswith(REPLACEMENT) else self._take(piece)

    def finish(self) -> str:
        """What was held back: no token follows that could complete it."""
        return self._take(self._piece())

    def _piece(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]

    def _take(self, piece: str) -> str:
        if piece:
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
        return piece
