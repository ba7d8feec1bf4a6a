"""How far two runs' logits are apart where their tokens agree: what a tie within rounding has to be measured by.

The difference of two log-probabilities is the difference of two logits. So the gap between the best and the second
token, in one run and in the other, shows the rounding of logits, whether the model is sure or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3dspark.acceptance.asking import Answer, Scores

FLOOR = 1e-4  # nats; fp32 logits of equal models differ by up to about this
UNKNOWN = 0.125  # one bf16 step at logits of 16 to 32: taken where too few gaps are known
FEW = 20
OFF = 1e-3  # nats by which a token must trail the best one to count as not chosen greedily


def gap(scores: Scores, first: int, second: int) -> float | None:
    """log p(first) − log p(second), or None when one of them is not among the scores."""
    known = dict(scores.best)
    if first not in known or second not in known:
        return None
    return known[first] - known[second]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two sequences share before they divide."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def moves(a: Answer, b: Answer) -> list[float]:
    """By how much the top-2 gap of `a` is another in `b`, at every token that both chose after the same tokens."""
    if not a.scores or not b.scores:
        return []
    result = []
    for one, other in zip(a.scores[: common(a.token_ids, b.token_ids)], b.scores, strict=False):
        if len(one.best) >= 2:
            pair = one.best[0][0], one.best[1][0]
            here, there = gap(one, *pair), gap(other, *pair)
            if here is not None and there is not None:
                result.append(abs(here - there))
    return result


@dataclass(frozen=True)
class Numerics:
    """Moves of the top-2 gap in nats, over so many positions."""

    positions: int
    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, found: Iterable[float]) -> Numerics | None:
        values = sorted(found)
        if not values:
            return None
        return cls(
            len(values), values[len(values) // 2], values[min(len(values) * 99 // 100, len(values) - 1)], values[-1]
        )

    @property
    def reading(self) -> str:
        """What such differences are typical of."""
        if self.largest == 0:
            return "the same bits"
        if self.p99 <= 2e-3:
            return "rounding of fp32"
        if self.p99 <= 0.7:
            return "rounding of a 16-bit format"
        return "more than rounding: other weights, another model or a fault"


def allowance(numerics: Sequence[Numerics | None], limit: float) -> float:
    """The widest gap, in nats, that is called a tie: twice the largest move seen elsewhere, and never above `limit`.

    A divergence needs a move at least as wide as both gaps together, and it is seen where moves are large: hence twice.
    """
    known = [n for n in numerics if n is not None]
    if sum(n.positions for n in known) < FEW:
        return min(limit, UNKNOWN)
    return min(limit, max(FLOOR, 2 * max(n.largest for n in known)))


def off_best(answers: Iterable[Answer]) -> tuple[int, int]:
    """Tokens that were not the best by the side's own log-probabilities, and tokens whose best is known."""
    off = known = 0
    for answer in answers:
        for scores in answer.scores:
            if scores.best:
                known += 1
                off += scores.best[0][1] - scores.chosen > OFF
    return off, known
