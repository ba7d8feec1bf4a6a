"""Counters: the identities that a headline number must obey (hazard I-42)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.decoding import DecodeStats, Engine, SamplingParams
from toy_models import ToyTarget, oracle

rounds = st.lists(st.integers(0, 7).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, v))), max_size=30)


def stats_of(history: list[tuple[int, int]], slots: int = 0) -> DecodeStats:
    stats = DecodeStats.with_slots(slots)
    for verified, accepted in history:
        stats.add_round(verified, accepted)
    return stats


@given(rounds)
def test_acceptance_length_counts_the_bonus_token_once(history: list[tuple[int, int]]) -> None:
    stats = stats_of(history)
    committed = sum(accepted + 1 for _, accepted in history)
    assert stats.committed == committed
    assert stats.acceptance_length == pytest.approx(committed / len(history) if history else 1.0)
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.per_slot_acceptance))


@given(st.lists(st.integers(0, 7), min_size=1))
def test_acceptance_length_is_one_plus_block_size_times_rate_at_full_blocks(accepted: list[int]) -> None:
    stats = stats_of([(7, n) for n in accepted])
    assert stats.acceptance_length == pytest.approx(1 + 7 * stats.acceptance_rate)


@given(rounds, rounds)
def test_sums_are_pooled_counters_not_means_of_ratios(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    assert stats_of(left) + stats_of(right) == stats_of(left + right)


def test_conditional_acceptance_divides_by_rounds_that_reached_the_slot() -> None:
    stats = stats_of([(7, 0), (7, 1), (7, 7), (1, 1)], slots=7)
    assert stats.conditional_acceptance == (3 / 4, 1 / 2, 1, 1, 1, 1, 1)
    assert stats.per_slot_acceptance == (3 / 4, *[1 / 4] * 6)


def test_unreached_slots_are_reported_as_zero() -> None:
    assert DecodeStats.with_slots(7).per_slot_acceptance == (0.0,) * 7


def test_identities_hold_for_real_rounds() -> None:
    target = ToyTarget()
    engine = Engine(target, oracle(target, [3, 1], 60, lambda position: position % 3 == 0))
    results = [engine.generate(p, SamplingParams(n)) for p, n in (([3, 1], 40), ([2], 9), ([5], 1))]
    for result in results:
        assert result.stats.committed + 1 == result.stats.new_tokens == len(result.token_ids)
    pooled = engine.stats
    assert pooled.new_tokens == 50
    assert pooled.prompt_tokens == 4
    assert pooled.acceptance_length == pytest.approx((pooled.new_tokens - 3) / pooled.rounds)


def test_speed_excludes_prefill_and_its_token() -> None:
    stats = DecodeStats(rounds=4, accepted=6, new_tokens=11, prefill_seconds=100.0)
    stats.add_times(draft=0.5, verify=1.0, host=0.5)
    assert stats.tokens_per_second == 10 / 2.0
