"""Streamed text: pieces that add up to the whole and never end inside a character."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from k3dspark.decoding.text import REPLACEMENT, TextStream

SPECIAL = 256


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level vocabulary: token = byte, id 256 is a special token without text."""
    return bytes(token for token in token_ids if token != SPECIAL).decode("utf-8", errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """A word vocabulary that drops the space before the first word of a text, as SentencePiece models do."""
    return " ".join(f"w{token}" for token in token_ids)


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    stream = TextStream(decode_bytes)
    first, second, third = "→".encode()
    assert [stream.push([first]), stream.push([second]), stream.push([third])] == ["", "", "→"]


def test_a_character_that_is_never_completed_comes_out_at_the_end() -> None:
    stream = TextStream(decode_bytes)
    assert stream.push(["→".encode()[0]]) == ""
    assert stream.finish() == REPLACEMENT


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    stream = TextStream(decode_bytes)
    assert stream.push([0xFF]) == ""
    assert stream.push(b"ok") == REPLACEMENT + "ok"


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(decode_bytes)
    assert [stream.push([SPECIAL]), stream.push(b"a"), stream.push([SPECIAL]), stream.finish()] == ["", "a", "", ""]


def test_a_word_keeps_the_space_that_separates_it_from_the_piece_before() -> None:
    stream = TextStream(decode_words)
    assert [stream.push([1]), stream.push([2, 3]), stream.push([4])] == ["w1", " w2 w3", " w4"]


@given(text=st.text(max_size=40), data=st.data())
def test_pieces_add_up_to_the_text_however_tokens_arrive(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode("utf-8", errors="ignore"))
    stream, out, start = TextStream(decode_bytes), "", 0
    while start < len(tokens):
        size = data.draw(st.integers(1, 8))
        piece = stream.push(tokens[start : start + size])
        assert not piece.endswith(REPLACEMENT) or REPLACEMENT in text
        out, start = out + piece, start + size
    assert out + stream.finish() == decode_bytes(tokens)
