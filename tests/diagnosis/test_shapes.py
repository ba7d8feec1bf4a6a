"""Every shape of low acceptance is recognised from its figures, and a healthy draft has none."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.diagnosis import wording_en, wording_zh
from k3dspark.diagnosis.evidence import Evidence, Expectation, RankEvidence
from k3dspark.diagnosis.observation import Observation
from k3dspark.diagnosis.shapes import CAUSES, Diagnosis, Found, recognise

HEALTHY = (0.78, 0.74, 0.74, 0.74, 0.75, 0.75, 0.75)


def survival(conditional: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(accumulate(conditional, lambda left, right: left * right))


def figures(conditional: tuple[float, ...] = HEALTHY, rounds: float = 5000, **more: object) -> Evidence:
    slots = survival(conditional)
    accepted = sum(slots) * rounds
    facts: dict[str, object] = {
        "model": "k3", "rounds": rounds, "drafted": rounds * len(slots), "accepted": accepted,
        "length": 1 + sum(slots), "slots": slots, "proposals": len(slots), "tokens": accepted + rounds,
    }  # fmt: skip
    return Evidence(**{**facts, **more})  # type: ignore[arg-type]


def shapes(evidence: Evidence, expectation: Expectation | None = None) -> list[str]:
    return [found.shape for found in recognise(evidence, expectation or Expectation()).found]


def requests(
    length: float, context: float, cached: float | None = None, count: int = 12, rounds: int = 60
) -> list[Observation]:
    """Requests that scatter a little around a length."""
    return [
        Observation(context, cached, rounds, rounds * (length - 1) * (1 + 0.05 * math.sin(index)))
        for index in range(count)
    ]


def test_a_healthy_draft_has_no_shape() -> None:
    ranks = tuple(RankEvidence(f"r{k}", 2500, 3.31 + 0.02 * k, survival(HEALTHY)) for k in range(2))
    same = tuple(requests(3.3, 1000, 0.0) + requests(3.3, 1000, 0.9) + requests(3.25, 50_000, 0.0))
    found = recognise(figures(ranks=ranks, break_even=1.8, observations=same), Expectation())
    assert found == Diagnosis("k3", (), ())


def test_all_slots_low() -> None:
    assert shapes(figures((0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5))) == ["all_slots_low"]


def test_low_is_measured_by_the_expectation() -> None:
    modest = figures((0.36, 0.37, 0.44, 0.33, 0.3, 0.3, 0.3))
    assert shapes(modest) == ["all_slots_low"]
    assert shapes(modest, Expectation(length=1.57)) == []


def test_the_first_slot_is_fine_and_the_second_is_not() -> None:
    assert shapes(figures((0.8, 0.12, 0.1, 0.1, 0.1, 0.1, 0.1))) == ["collapse_after_first"]


def test_a_later_slot_breaks_and_is_named() -> None:
    (found,) = recognise(figures((0.9, 0.9, 0.9, 0.9, 0.05, 0.1, 0.1)), Expectation()).found
    assert (found.shape, found.facts["slot"], found.causes[0]) == ("collapse_at_slot", 5, "query_rows")


def test_more_proposals_than_the_block_die_where_the_block_ends() -> None:
    found = recognise(figures((0.9, 0.9, 0.9, 0.9, 0.9, 0.02, 0.0)), Expectation(block=5)).found
    assert [each.shape for each in found] == ["more_proposals", "collapse_at_slot"]
    assert (found[1].facts["slot"], found[1].causes[0]) == (6, "beyond_block")


def test_nothing_accepted_is_not_also_called_low() -> None:
    assert shapes(figures((0.0,) * 7, break_even=1.9)) == ["exactly_one"]
    assert shapes(figures((0.001,) * 7)) == ["exactly_one"]


def test_six_proposals_instead_of_seven() -> None:
    (found,) = recognise(figures(HEALTHY[:6]), Expectation()).found
    assert (found.shape, found.facts) == ("fewer_proposals", {"number": 6, "block": 7})


def test_proposals_are_counted_without_slots_too() -> None:
    gauges = Evidence("k3", length=3.4, proposals=6.0, tokens=400.0)
    assert shapes(gauges) == ["fewer_proposals"]


def test_adaptive_verification_is_no_lack_of_proposals() -> None:
    assert shapes(figures(drafted=5000 * 3.2, proposals=3.2)) == []


def test_accepted_but_below_break_even() -> None:
    (found,) = recognise(figures(break_even=4.4, break_even_basis="measured"), Expectation()).found
    assert (found.shape, found.facts["break_even"]) == ("below_break_even", 4.4)
    assert shapes(figures(break_even=2.0)) == []


def test_ranks_that_differ_by_more_than_chance() -> None:
    good, bad = survival(HEALTHY), survival((0.5,) * 7)
    ranks = (RankEvidence("a", 3000, 1 + sum(good), good), RankEvidence("b", 3000, 1 + sum(bad), bad))
    found = recognise(figures(ranks=ranks), Expectation()).found
    assert [each.shape for each in found] == ["ranks_differ"]
    assert (found[0].facts["low_name"], found[0].facts["high_name"]) == ("b", "a")


def test_ranks_that_did_little_are_not_compared() -> None:
    good, bad = survival(HEALTHY), survival((0.5,) * 7)
    ranks = (RankEvidence("a", 3000, 1 + sum(good), good), RankEvidence("b", 50, 1 + sum(bad), bad))
    assert shapes(figures(ranks=ranks)) == []


def test_falling_with_the_context() -> None:
    # As reported for K3: 2.98 up to 16K tokens, 2.45 at 64–128K, and so on.
    seen = requests(3.2, 1000) + requests(2.9, 20_000) + requests(2.5, 50_000) + requests(2.1, 90_000)
    (found,) = recognise(figures(observations=tuple(seen)), Expectation()).found
    assert (found.shape, found.facts["beyond"], found.causes[0]) == ("falls_with_context", 65536, "yarn_missing")


def test_good_at_short_and_dead_beyond_100k() -> None:
    seen = requests(3.2, 1000) + requests(3.0, 40_000) + requests(2.9, 98_000) + requests(1.1, 120_000)
    (found,) = recognise(figures(observations=tuple(seen)), Expectation()).found
    assert (found.shape, found.facts["at"], found.causes[0]) == ("dead_beyond", 102400, "draft_limit")


def test_dead_beyond_the_original_context_is_yarn_first() -> None:
    seen = requests(3.2, 1000) + requests(3.1, 20_000) + requests(1.2, 40_000)
    (found,) = recognise(figures(observations=tuple(seen)), Expectation()).found
    assert (found.facts["at"], found.causes[0]) == (32768, "yarn_missing")


def test_warm_prefixes_worse_than_cold_ones() -> None:
    seen = requests(3.2, 6000, 0.0) + requests(1.8, 6000, 0.95)
    (found,) = recognise(figures(observations=tuple(seen)), Expectation()).found
    assert (found.shape, found.causes[0]) == ("warm_worse", "prefix_rows")


def test_long_warm_requests_do_not_make_the_cache_guilty() -> None:
    # Acceptance falls with the context; long prompts happen to be warm, and within a length the cache changes nothing.
    seen = [
        *requests(3.2, 1000, 0.0), *requests(3.2, 1000, 0.9, count=4),
        *requests(1.9, 60_000, 0.0, count=4), *requests(1.9, 60_000, 0.9),
    ]  # fmt: skip
    assert "warm_worse" not in shapes(figures(observations=tuple(seen)))


def test_tokens_without_a_draft() -> None:
    assert shapes(Evidence("k3", tokens=900.0)) == ["not_drafting"]
    assert shapes(Evidence("k3", rounds=900, drafted=0, accepted=0, length=1.0, tokens=900)) == ["not_drafting"]


def test_slots_that_do_not_add_up_are_said_beside_the_rest() -> None:
    assert shapes(figures(slots_add_up=False)) == ["slots_do_not_add_up"]


def test_a_few_rounds_are_no_evidence() -> None:
    few = recognise(figures((0.3,) * 7, rounds=60), Expectation())
    assert few.found == ()
    assert "too_few_rounds" in few.unjudged


def test_what_could_not_be_judged_is_said() -> None:
    assert recognise(Evidence("k3", length=3.4, proposals=7.0), Expectation()).unjudged == (
        "no_slots", "no_break_even", "no_context_lengths", "no_warm_and_cold", "one_rank",
    )  # fmt: skip


@given(st.integers(1, 12), st.floats(1.05, 8.0))
def test_the_expected_slot_gives_back_the_expected_length(block: int, length: float) -> None:
    expectation = Expectation(block, min(length, 1 + 0.99 * block))
    a = expectation.conditional
    assert 1 + sum(a**slot for slot in range(1, block + 1)) == pytest.approx(expectation.length, abs=1e-6)


@given(st.lists(st.floats(0, 1), max_size=9), st.integers(0, 10**6), st.lists(st.floats(0, 1), max_size=3))
def test_no_figures_make_a_diagnosis_fail(conditional: list[float], rounds: int, shares: list[float]) -> None:
    seen = tuple(
        Observation(10.0 ** (3 + share * 3), share, rounds, rounds * share) for share in shares for _ in "abcd"
    )
    evidence = figures(tuple(conditional), rounds=rounds, observations=seen)
    for found in recognise(evidence, Expectation()).found:
        for words in (wording_en, wording_zh):
            assert words.SHAPES[found.shape][1].format_map(found.facts)


def test_every_shape_and_cause_has_words_in_both_languages() -> None:
    for words in (wording_en, wording_zh):
        assert words.SHAPES.keys() == CAUSES.keys()
        assert words.CAUSES.keys() == {cause for causes in CAUSES.values() for cause in causes}
    assert wording_en.UNJUDGED.keys() == wording_zh.UNJUDGED.keys()
    assert Found("exactly_one", {}, CAUSES["exactly_one"]).causes[0] == "not_loaded"
