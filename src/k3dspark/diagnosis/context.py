"""Acceptance against context length, and with a warm prefix cache against a cold one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from k3dspark.diagnosis.observation import Observation, Pooled, pool

EDGES: Final = (0, 2048, 8192, 32768, 65536, 102400, 204800)
LEAST_ROUNDS: Final = 100
LEAST_REQUESTS: Final = 3
SURE: Final = 3.0  # standard errors
WARM: Final = 0.5
COLD: Final = 0.1


@dataclass(frozen=True)
class Bin:
    """Requests with contexts from `low` tokens up to the next edge."""

    low: int
    pooled: Pooled


@dataclass(frozen=True)
class Cliff:
    """Acceptance is alive in the bin before `at` tokens and dead from there on."""

    at: int
    before: float
    after: float


@dataclass(frozen=True)
class Fall:
    """Acceptance lengths of the shortest and of the longest contexts."""

    short: float
    long: float
    short_until: int
    long_from: int


@dataclass(frozen=True)
class Warmth:
    """Acceptance lengths of requests of like context, without and with most of the prompt from the prefix cache."""

    cold: float
    warm: float


def bins(observations: Sequence[Observation]) -> list[Bin]:
    """By context length; what holds too little is left out."""
    found = []
    for low, group in _groups(observations).items():
        pooled = pool(group)
        if pooled.rounds >= LEAST_ROUNDS and pooled.count >= LEAST_REQUESTS:
            found.append(Bin(low, pooled))
    return found


def cliff(by_context: Sequence[Bin]) -> Cliff | None:
    """Where acceptance dies: most of it there before an edge, less than a third from there on."""
    if len(by_context) < 2:
        return None
    whole = by_context[0].pooled.length - 1
    for index, (before, after) in enumerate(pairwise(by_context), 1):
        dead = all(later.pooled.length - 1 < 0.3 * whole for later in by_context[index:])
        if before.pooled.length - 1 >= 0.6 * whole > 0.06 and dead and _sure(before.pooled, after.pooled):
            return Cliff(after.low, before.pooled.length, after.pooled.length)
    return None


def fall(by_context: Sequence[Bin]) -> Fall | None:
    """A decline that is no cliff: the longest contexts keep less than three quarters of what the shortest have."""
    if len(by_context) < 2:
        return None
    short, long = by_context[0], by_context[-1]
    if long.pooled.length - 1 < 0.75 * (short.pooled.length - 1) and _sure(short.pooled, long.pooled):
        after = next(edge for edge in EDGES[1:] if edge > short.low)
        return Fall(short.pooled.length, long.pooled.length, after, long.low)
    return None


def warmth(observations: Sequence[Observation]) -> Warmth | None:
    """Compared inside bins of like context, or a longer shared prefix would pass for the cache's fault."""
    weight = cold_sum = warm_sum = variance = 0.0
    for group in _groups(observations).values():
        cold = [o for o in group if o.cached_share is not None and o.cached_share <= COLD]
        warm = [o for o in group if o.cached_share is not None and o.cached_share >= WARM]
        if len(cold) < LEAST_REQUESTS or len(warm) < LEAST_REQUESTS:
            continue
        left, right = pool(cold), pool(warm)
        share = min(left.rounds, right.rounds)
        weight += share
        cold_sum, warm_sum = cold_sum + share * left.length, warm_sum + share * right.length
        variance += share**2 * (left.error**2 + right.error**2)
    if weight < LEAST_ROUNDS:
        return None
    cold_length, warm_length = cold_sum / weight, warm_sum / weight
    sure = cold_length - warm_length > SURE * math.sqrt(variance) / weight
    return Warmth(cold_length, warm_length) if sure and warm_length - 1 < 0.8 * (cold_length - 1) else None


def has_both_temperatures(observations: Sequence[Observation]) -> bool:
    """Whether warm and cold requests can be compared at all."""
    shares = [o.cached_share for o in observations if o.cached_share is not None]
    return sum(s >= WARM for s in shares) >= LEAST_REQUESTS and sum(s <= COLD for s in shares) >= LEAST_REQUESTS


def _groups(observations: Sequence[Observation]) -> dict[int, list[Observation]]:
    groups: dict[int, list[Observation]] = {}
    for low, high in pairwise((*EDGES, math.inf)):
        inside = [o for o in observations if low <= o.context_tokens < high]
        if inside:
            groups[int(low)] = inside
    return groups


def _sure(left: Pooled, right: Pooled) -> bool:
    return left.length - right.length > SURE * math.hypot(left.error, right.error)
