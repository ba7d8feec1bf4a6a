"""The built-in inputs: exactly as long as asked, always the same, and with nothing in common that a cache could use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from k3dspark.acceptance import texts
from k3dspark.acceptance.inputs import built_in, fitting, parse_lengths, read_file
from k3dspark.errors import BadInput


class Letters:
    """A tokenizer that gives every two letters an id."""

    origin = "pairs of letters"

    def encode(self, text: str) -> list[int]:
        return [ord(a) * 1000 + ord(b) for a, b in zip(text[::2], text[1::2], strict=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token // 1000) + chr(token % 1000) for token in token_ids)

    def id_of(self, name: str) -> int | None:
        return None


def test_prompts_have_exactly_the_length_and_are_the_same_every_time() -> None:
    one, again = (built_in((100, 3000), 5, 8, Letters(), chat=True) for _ in range(2))
    assert one == again
    lengths = [len(given.question.token_ids or ()) for given in one.inputs if given.by_ids]
    assert lengths == [100] * 5 + [3000] * 5


def test_no_two_prompts_begin_alike() -> None:
    inputs = built_in((64, 128), 8, 8, Letters(), chat=False).inputs
    assert len({(given.question.token_ids or ())[:16] for given in inputs}) == 16


def test_five_kinds_at_each_length_and_more_texts_when_kinds_run_out() -> None:
    names = [given.name for given in built_in((1024,), 9, 8, Letters(), chat=False).inputs]
    assert names[:5] == ["1K english", "1K chinese", "1K code", "1K spanish", "1K records"]
    assert names[8] == "1K english 2"


@pytest.mark.parametrize("kind", texts.KINDS)
def test_texts_do_not_loop(kind: str) -> None:
    lines = [piece for piece, _ in zip(texts.pieces(kind, 0), range(400), strict=False)]
    assert len(set(lines)) > 300


def test_without_a_tokenizer_prompts_are_texts_and_the_report_says_so() -> None:
    made = built_in((100,), 1, 8, None, chat=False)
    assert made.inputs[0].question.text is not None
    assert any("no tokenizer" in note for note in made.notes)
    assert any("no chat template" in note for note in made.notes)


def test_lengths_are_cut_to_the_context() -> None:
    assert fitting((1024, 32768), 65536, 128) == ((1024, 32768), ())
    kept, notes = fitting((1024, 32768, 131072), 8192, 128)
    assert kept == (1024, 8064)
    assert len(notes) == 2
    assert fitting((1024, 32768), 1160, 128)[0] == (1024,)  # too near to another to be worth it
    with pytest.raises(BadInput, match="no room"):
        fitting((1024,), 100, 90)


def test_lengths_are_read_in_thousands_of_24() -> None:
    assert parse_lengths("32K,1k, 500") == (500, 1024, 32768)
    for wrong in ("", "1M", "-1", "0", "1.5K"):
        with pytest.raises(BadInput):
            parse_lengths(wrong)


def test_names_of_a_file_are_made_unique(tmp_path: Path) -> None:
    file = tmp_path / "inputs"
    file.write_text('{"prompt": "ab", "name": "x"}\n{"prompt": "cd", "name": "x"}\n')
    made = read_file(file, 8, Letters())
    assert [given.name for given in made.inputs] == ["x", "x, line 2"]
    assert made.inputs[0].question.token_ids == (97098,)
