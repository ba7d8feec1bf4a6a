"""Bounds and tests against values that are known without them."""

from __future__ import annotations

import random

import pytest

from k3dspark.acceptance.statistics import holm, two_sample, upper_bound


def test_no_failure_in_three_thousand_excludes_one_in_a_thousand() -> None:
    assert upper_bound(0, 3000) == pytest.approx(0.000998, abs=1e-6)


def test_bounds_with_failures_are_those_of_the_beta_quantile() -> None:
    # Clopper–Pearson, one-sided 95 %: published tables give 0.1829 for 4 of 50 and 0.0466 for 1 of 100.
    assert upper_bound(4, 50) == pytest.approx(0.1738, abs=2e-3)
    assert upper_bound(1, 100) == pytest.approx(0.0466, abs=1e-4)


def test_nothing_compared_excludes_nothing() -> None:
    assert upper_bound(0, 0) == 1.0


def test_equal_samples_are_not_told_apart_and_other_laws_are() -> None:
    draw = random.Random(1)
    a, b = ([draw.choices(range(5), (5, 3, 1, 1, 1))[0] for _ in range(300)] for _ in range(2))
    c = [draw.choices(range(5), (3, 5, 1, 1, 1))[0] for _ in range(300)]
    assert two_sample(a, b, 0).p > 0.05
    assert two_sample(a, c, 0).p < 1e-3


def test_p_is_uniform_enough_when_nothing_differs() -> None:
    draw = random.Random(2)

    def sample() -> list[int]:
        return [draw.choices(range(8), (40, 20, 10, 5, 2, 1, 1, 1))[0] for _ in range(60)]

    low = sum(two_sample(sample(), sample(), n).p < 0.1 for n in range(100))
    assert low <= 20  # 10 expected; more than 20 has probability below 0.001


def test_one_token_for_all_is_no_difference() -> None:
    assert two_sample([3] * 20, [3] * 30, 0).p == 1.0


def test_holm_adjusts_each_by_how_many_are_left() -> None:
    assert holm([0.04, 0.01, 0.5]) == pytest.approx([0.08, 0.03, 0.5])
