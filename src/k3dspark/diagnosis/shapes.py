"""The shapes that low acceptance takes in metrics, each with its likely causes in order. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from k3dspark.diagnosis import context
from k3dspark.diagnosis.evidence import Evidence, Expectation

LEAST_ROUNDS: Final = 200
NOTHING: Final = 0.02  # accepted a round: less is as good as none
REACHED: Final = 0.05  # a slot reached in fewer rounds than this says nothing about the next
SURE: Final = 3.0  # standard errors

# Causes by shape, the likeliest first; their words are in wording_en and wording_zh.
CAUSES: Final = {
    "not_drafting": ("no_configuration", "switched_off", "plain_server", "statistics_off"),
    "exactly_one": ("not_loaded", "slots_read_early", "wrong_pair", "wrong_taps", "sampler"),
    "fewer_proposals": ("width_given_as_proposals", "chosen"),
    "more_proposals": ("proposals_given_as_width", "smaller_block"),
    "collapse_after_first": ("mask_shape", "markov", "mask_token", "block_positions"),
    "collapse_at_slot": ("beyond_block", "cut_by_adaptation", "query_rows"),
    "all_slots_low": ("wrong_taps", "wrong_stream", "traffic", "yarn_scale", "precision", "wrong_pair"),
    "below_break_even": ("too_many_tokens", "no_graph", "slow_link", "experts_at_one"),
    "dead_beyond": ("draft_limit", "yarn_missing", "prefix_rows", "not_trained_long"),
    "falls_with_context": ("yarn_missing", "not_trained_long", "prefix_rows", "precision"),
    "warm_worse": ("prefix_rows", "index_cache"),
    "ranks_differ": ("node_weights", "node_software", "routing", "device_fault"),
    "slots_do_not_add_up": ("rank_slots_uncounted",),
}
# Beyond what a rope without YaRN covers: below this a cliff is the rope's, above it a limit is likelier.
_ORIGINAL_CONTEXT: Final = 32768


@dataclass(frozen=True)
class Found:
    """One shape. `facts` are the numbers that show it; `causes` are ids, the likeliest first."""

    shape: str
    facts: dict[str, float | str]
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """`unjudged` are ids of what could not be looked at, for lack of evidence."""

    model: str
    found: tuple[Found, ...]
    unjudged: tuple[str, ...]


def recognise(evidence: Evidence, expectation: Expectation) -> Diagnosis:
    """Every shape in this evidence, those that explain others first."""
    found = [*_drafting(evidence)]
    if not found:
        found += _number_of_proposals(evidence, expectation)
        nothing = _nothing_accepted(evidence)
        found += nothing or _over_slots(evidence, expectation)
        found += _by_context(evidence)
        found += _by_warmth(evidence)
        found += _by_rank(evidence)
        if not nothing:
            found += _cost(evidence)
        if not evidence.slots_add_up:
            found.append(_found("slots_do_not_add_up", slots=1 + sum(evidence.slots), length=evidence.length or 0.0))
    return Diagnosis(evidence.model, tuple(found), tuple(_unjudged(evidence)))


def _found(shape: str, causes: tuple[str, ...] | None = None, **facts: float | str) -> Found:
    return Found(shape, facts, causes or CAUSES[shape])


def _enough(evidence: Evidence) -> bool:
    """Gauges come without a number of rounds: they have to be believed."""
    return evidence.length is not None and (evidence.rounds is None or evidence.rounds >= LEAST_ROUNDS)


def _drafting(evidence: Evidence) -> Iterator[Found]:
    if evidence.tokens and ((not evidence.rounds and evidence.length is None) or evidence.drafted == 0):
        yield _found("not_drafting", tokens=evidence.tokens)


def _number_of_proposals(evidence: Evidence, expectation: Expectation) -> Iterator[Found]:
    # Slots are there for every proposal the engine may make; the mean shrinks under adaptive verification.
    number = len(evidence.slots) or (round(evidence.proposals) if evidence.proposals else 0)
    if number and number < expectation.block:
        yield _found("fewer_proposals", number=number, block=expectation.block)
    elif number > expectation.block:
        yield _found("more_proposals", number=number, block=expectation.block)


def _nothing_accepted(evidence: Evidence) -> list[Found]:
    if _enough(evidence) and evidence.length is not None and evidence.length - 1 < NOTHING:
        return [_found("exactly_one", length=evidence.length)]
    return []


def _over_slots(evidence: Evidence, expectation: Expectation) -> Iterator[Found]:
    if not _enough(evidence) or evidence.length is None:
        return
    usual = expectation.conditional
    conditional = _conditional(evidence.slots)
    if len(conditional) > 1 and evidence.slots[0] >= 0.7 * usual and conditional[1] < 0.5 * usual:
        yield _found("collapse_after_first", first=evidence.slots[0], second=conditional[1])
        return
    broken = _broken_slot(evidence.slots)
    if broken is not None:
        slot, before = broken
        causes = CAUSES["collapse_at_slot"]
        if slot <= expectation.block:
            causes = ("query_rows", "cut_by_adaptation", "beyond_block")
        yield _found("collapse_at_slot", causes, slot=slot, share=conditional[slot - 1], before=before)
        return
    error = _error(evidence.slots, evidence.rounds)
    missing = expectation.length - evidence.length
    if evidence.length - 1 < 0.7 * (expectation.length - 1) and missing > SURE * error:
        yield _found("all_slots_low", length=evidence.length, expected=expectation.length)


def _conditional(slots: Sequence[float]) -> list[float]:
    """Acceptance of each slot among rounds that kept the one before."""
    return [share / before if before > 0 else 0.0 for before, share in zip((1.0, *slots), slots, strict=False)]


def _broken_slot(slots: Sequence[float]) -> tuple[int, float] | None:
    """(slot, mean conditional acceptance before it) of the first slot from 3 on that halves it; None if none does."""
    conditional = _conditional(slots)
    for index in range(2, len(slots)):
        if slots[index - 1] < REACHED:
            return None
        before = sum(conditional[1:index]) / (index - 1)
        if conditional[index] < 0.5 * before:
            return index + 1, before
    return None


def _error(slots: Sequence[float], rounds: float | None) -> float:
    """Standard error of the length. Rounds of one request resemble each other: the variance is taken twice."""
    if not slots or not rounds:
        return 0.0
    mean = sum(slots)
    # N accepted has P(N ≥ k) = slots[k−1], so E N² = Σ (2k − 1) P(N ≥ k).
    variance = sum((2 * k - 1) * share for k, share in enumerate(slots, 1)) - mean**2
    return math.sqrt(2 * max(variance, 0.0) / rounds)


def _cost(evidence: Evidence) -> Iterator[Found]:
    if evidence.length is not None and evidence.break_even is not None and evidence.length < evidence.break_even:
        basis = evidence.break_even_basis
        yield _found("below_break_even", length=evidence.length, break_even=evidence.break_even, basis=basis)


def _by_context(evidence: Evidence) -> Iterator[Found]:
    by_context = context.bins(evidence.observations)
    cliff = context.cliff(by_context)
    if cliff is not None:
        causes = CAUSES["dead_beyond"]
        if cliff.at <= _ORIGINAL_CONTEXT:
            causes = ("yarn_missing", "draft_limit", "prefix_rows", "not_trained_long")
        yield _found("dead_beyond", causes, at=cliff.at, before=cliff.before, after=cliff.after)
        return
    fall = context.fall(by_context)
    if fall is not None:
        yield _found(
            "falls_with_context", short=fall.short, long=fall.long, until=fall.short_until, beyond=fall.long_from
        )


def _by_warmth(evidence: Evidence) -> Iterator[Found]:
    warmth = context.warmth(evidence.observations)
    if warmth is not None:
        yield _found("warm_worse", cold=warmth.cold, warm=warmth.warm)


def _by_rank(evidence: Evidence) -> Iterator[Found]:
    ranks = [rank for rank in evidence.ranks if rank.rounds is None or rank.rounds >= LEAST_ROUNDS]
    if len(ranks) < 2:
        return
    low, high = min(ranks, key=lambda r: r.length), max(ranks, key=lambda r: r.length)
    error = math.hypot(_error(low.slots, low.rounds), _error(high.slots, high.rounds))
    if high.length - low.length > max(0.2 * (high.length - 1), SURE * error):
        yield _found("ranks_differ", low=low.length, low_name=low.name, high=high.length, high_name=high.name)


def _unjudged(evidence: Evidence) -> Iterator[str]:
    if not _enough(evidence):
        yield "too_few_rounds"
    if not evidence.slots:
        yield "no_slots"
    if evidence.break_even is None:
        yield "no_break_even"
    if len(context.bins(evidence.observations)) < 2:
        yield "no_context_lengths"
    if not context.has_both_temperatures(evidence.observations):
        yield "no_warm_and_cold"
    if len(evidence.ranks) < 2:
        yield "one_rank"
