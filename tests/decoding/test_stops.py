"""Stop strings across token borders, and text that never shows a part of one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.stops import StopFilter, StopStrings
from toy_models import ToyTarget, oracle

LETTERS = "abcdefghijk"


def letters(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[t] for t in token_ids)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_shown_text_is_the_text_before_the_first_stop_string(
    text: str, strings: list[str], data: st.DataObject
) -> None:
    stops = StopFilter(strings)
    shown, rest = "", text
    while rest and not stops.stopped:
        size = data.draw(st.integers(1, len(rest)))
        shown += stops.push(rest[:size])
        rest = rest[size:]
        assert text.startswith(shown)
    if not stops.stopped:
        shown += stops.finish()
    ends = [text.index(s) + len(s) for s in strings if s in text]
    # The string that is complete first, wherever the pieces were cut, begins where the shown text ends.
    assert stops.stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert not any(s in shown for s in strings)
        assert any(text[len(shown) :].startswith(s) for s in strings)


def test_stop_string_may_span_tokens() -> None:
    stops = StopStrings(letters, ("cab",))
    assert [stops.push(LETTERS.index(c)) for c in "abccab"] == [False] * 5 + [True]


def test_engine_stops_after_the_token_that_completes_a_stop_string() -> None:
    target = ToyTarget()
    answer = letters(target.greedy([3, 1], 30))
    string = answer[9:12]
    end = answer.index(string) + 3
    for draft in (None, oracle(target, [3, 1], 40)):
        engine = Engine(target, draft, decode=letters)
        result = engine.generate([3, 1], SamplingParams(30, stop_strings=("zzz", string)))
        assert letters(result.token_ids) == answer[:end]
        assert result.finish_reason == "stop"
