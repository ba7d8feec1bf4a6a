"""Plain and speculative decoding side by side: fair turns, true figures, nothing left open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.compare import WARM_UP_TOKENS, compare
from toy_models import ToyTarget, oracle

PROMPT = [1, 2, 3]
LENGTH = 40


def engines(target: ToyTarget, wrong_every: int = 3) -> tuple[Engine, Engine]:
    draft = oracle(target, PROMPT, LENGTH, lambda position: position % wrong_every == 0)
    return Engine(target, draft), Engine(target)


def test_both_give_the_targets_own_tokens() -> None:
    target = ToyTarget()
    comparison = compare(*engines(target), PROMPT, SamplingParams(LENGTH))
    assert list(comparison.speculative.token_ids) == target.greedy(PROMPT, LENGTH)
    assert comparison.identical
    assert comparison.first_difference is None


def test_the_committed_tokens_are_reported_in_order_without_the_warm_up() -> None:
    seen: list[int] = []
    comparison = compare(*engines(ToyTarget()), PROMPT, SamplingParams(LENGTH), seen.extend)
    assert tuple(seen) == comparison.speculative.token_ids


def test_the_warm_up_is_in_no_figure() -> None:
    comparison = compare(*engines(ToyTarget()), PROMPT, SamplingParams(LENGTH))
    assert comparison.plain.stats.rounds == LENGTH - 1
    assert comparison.plain.stats.prompt_tokens == len(PROMPT)


def test_the_two_take_turns_instead_of_running_one_after_the_other() -> None:
    target = ToyTarget()
    speculative, plain = engines(target)
    compare(speculative, plain, PROMPT, SamplingParams(LENGTH))
    rows = target.forward_rows[-len(PROMPT) - LENGTH :]
    first_half = rows[: len(rows) // 2]
    assert 1 in first_half  # a plain pass
    assert 8 in first_half  # a full block


def test_the_speed_up_is_the_ratio_of_the_two_rates() -> None:
    comparison = compare(*engines(ToyTarget()), PROMPT, SamplingParams(LENGTH))
    ratio = comparison.speculative.stats.tokens_per_second / comparison.plain.stats.tokens_per_second
    assert comparison.speedup == ratio


@pytest.mark.parametrize("count", [1, WARM_UP_TOKENS])
def test_an_answer_as_short_as_the_warm_up_is_compared_too(count: int) -> None:
    comparison = compare(*engines(ToyTarget()), PROMPT, SamplingParams(count))
    assert len(comparison.plain.token_ids) == count
    assert comparison.identical


def test_the_first_difference_is_where_the_tokens_part_or_one_of_them_ends() -> None:
    comparison = compare(*engines(ToyTarget()), PROMPT, SamplingParams(LENGTH))
    ours = comparison.speculative
    changed = (*ours.token_ids[:5], -1, *ours.token_ids[6:])
    assert replace(comparison, speculative=replace(ours, token_ids=changed)).first_difference == 5
    assert replace(comparison, speculative=replace(ours, token_ids=ours.token_ids[:7])).first_difference == 7


def test_an_interrupted_comparison_leaves_no_sequence_open() -> None:
    target = ToyTarget()

    def interrupt(_: Sequence[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*engines(target), PROMPT, SamplingParams(LENGTH), interrupt)
    assert target.open_sequences == 0
