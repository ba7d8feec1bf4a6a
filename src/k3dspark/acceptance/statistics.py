"""The three pieces of statistics that a verdict needs: a bound on a rate, a two-sample test, and many tests at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 20_000
CONFIDENCE = 0.95


def upper_bound(failures: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided Clopper–Pearson bound (1934): the rate at which so few failures have probability 1 − confidence."""
    if trials == 0 or failures >= trials:
        return 1.0
    if failures == 0:
        return -math.expm1(math.log1p(-confidence) / trials)
    low, high = failures / trials, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if _at_most(failures, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(failures: int, trials: int, rate: float) -> float:
    """P(X ≤ failures) of a binomial."""
    terms = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(failures + 1)
    ]  # fmt: skip
    return sum(math.exp(term) for term in terms)


@dataclass(frozen=True)
class TwoSample:
    """`distance` is the total variation between the two empirical laws; `null_distance` is what chance alone exceeds
    once in twenty: a true difference much below it would not be seen.
    """

    statistic: float
    p: float
    distance: float
    null_distance: float


def two_sample(a: Sequence[int], b: Sequence[int], seed: int) -> TwoSample:
    """Do two samples of tokens come from one distribution? Pearson's chi-square, its law by permutation.

    Given the counts of all tokens together, those of `a` are multivariate hypergeometric when the distributions are
    equal (Fisher's exact law), whatever the distribution: so rare tokens need no pooling, and p is valid at any size.
    """
    tokens = sorted(set(a) | set(b))
    of_a, of_b = Counter(a), Counter(b)
    counts = np.array([of_a[token] for token in tokens])
    totals = counts + np.array([of_b[token] for token in tokens])
    draws = np.random.default_rng(seed).multivariate_hypergeometric(
        totals, len(a), size=PERMUTATIONS, method="marginals"
    )
    share = len(a) / (len(a) + len(b))
    weight = totals * share * (1 - share)

    def statistic(values: np.ndarray) -> np.ndarray:
        return ((values - totals * share) ** 2 / weight).sum(-1)

    def distance(values: np.ndarray) -> np.ndarray:
        return np.abs(values / len(a) - (totals - values) / len(b)).sum(-1) / 2

    observed = float(statistic(counts))
    exceeding = int((statistic(draws) >= observed * (1 - 1e-12)).sum())
    return TwoSample(
        observed,
        (1 + exceeding) / (1 + PERMUTATIONS),
        float(distance(counts)),
        float(np.quantile(distance(draws), CONFIDENCE)),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given: the chance that any of them misleads."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted
