"""Which one change restores acceptance: every candidate tried on a few prompts, the best judged on others.

Variants are chosen on one part of the prompts and judged on the rest, so that having chosen them proves nothing. The
judged figure is the log-probability that the draft gives to the target's own next tokens: the acceptance itself is
a yes or no for each token, and a few hundred of those would miss most faults of a draft that is good at few slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.diagnosis.capture import Conversation
from k3dspark.diagnosis.changes import Candidate, candidates
from k3dspark.diagnosis.replay import COARSE, Scores, join, replay
from k3dspark.diagnosis.subject import Subject
from k3dspark.diagnosis.wiring import Wiring
from k3dspark.errors import BadInput

RESAMPLES = 10_000
CHOOSING = 4  # one prompt of so many chooses, the rest judge
GLANCE = 3  # choosing prompts after which the worst variants are given up
KEPT = 16  # variants that are not
JUDGED = 4  # changes that are judged
LEAST_PROMPTS = 12
LEAST_ANCHORS = 60  # of the judging prompts
DEAD = 1.1  # acceptance length below which a pair is not healthy, whatever the changes say


@dataclass(frozen=True)
class ExperimentSettings:
    """`margin` is what a change must surely bring, in nats a draft token; `level` holds for all judged together.

    `changes` are those to try, None for all.
    """

    new_tokens: int = 40
    margin: float = 0.01
    level: float = 0.95
    seed: int = 0
    changes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Judged:
    """A change on the judging prompts, against the draft as it is.

    `gain` in nats a draft token with its interval; `length` is its acceptance length, and `length_gain` what it adds to
    that, with its own interval.
    """

    candidate: Candidate
    gain: float
    gain_interval: tuple[float, float]
    length: float
    length_gain: float
    length_interval: tuple[float, float]
    restores: bool


@dataclass(frozen=True)
class Experiment:
    """`judged` best first; `screened` has the gain of every variant on the choosing prompts, `not_tried` the reasons.

    `context_gain` is what the taps bring, against taps of zeros: a draft that loses nothing without them reads noise.
    """

    target: str
    draft: str
    prompts: int
    anchors: int
    length: float
    judged: tuple[Judged, ...]
    screened: tuple[tuple[str, str, float], ...]
    not_tried: dict[str, str]
    context_gain: float
    context_interval: tuple[float, float]
    margin: float
    level: float

    @property
    def causes(self) -> tuple[Judged, ...]:
        """Changes that restore acceptance beyond the margin, best first."""
        return tuple(judged for judged in self.judged if judged.restores)

    @property
    def reads_context(self) -> bool:
        return self.context_interval[0] > self.margin

    @property
    def verdict(self) -> str:
        """`cause_found`; `unexplained`: next to nothing is accepted or the taps bring nothing; `nothing_wrong`."""
        if self.causes:
            return "cause_found"
        return "nothing_wrong" if self.reads_context and self.length >= DEAD else "unexplained"


def experiment(
    subject: Subject,
    prompts: Sequence[str],
    settings: ExperimentSettings | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Experiment:
    """Record the target's answers once, then try every change on them; `report` hears of wirings tried, of how many.

    Raises `BadInput` for fewer than 12 prompts, or answers too short to hold enough blocks.
    """
    settings = settings or ExperimentSettings()
    if len(prompts) < LEAST_PROMPTS:
        raise BadInput(
            f"{len(prompts)} prompts",
            f"a quarter chooses between changes and the others judge: {LEAST_PROMPTS} are the least that can",
            "give more prompts, or none for the built-in ones",
        )
    tried, refused = candidates(subject, settings.changes)
    layers = sorted({tap.layer for candidate in tried for tap in candidate.wiring.taps})
    ids = [subject.prompt_ids(prompt) for prompt in prompts]
    steps = _Steps(report, 1 + len(tried) + min(KEPT, len(tried)) + JUDGED + 4)
    recorded = subject.recorder.record(ids, settings.new_tokens, subject.stop_ids, layers)
    steps.add()
    choosing, judging = recorded[::CHOOSING], [c for i, c in enumerate(recorded) if i % CHOOSING]
    screened = _screen(subject.wiring, tried, choosing, steps)
    best: dict[str, tuple[Candidate, float]] = {}
    for candidate, gain in screened:
        if candidate.change not in best or gain > best[candidate.change][1]:
            best[candidate.change] = candidate, gain
    finalists = [c for c, _ in sorted(best.values(), key=lambda entry: -entry[1])[:JUDGED]]

    def run(wiring: Wiring) -> Scores:
        scores = replay(wiring, judging)
        steps.add()
        return scores

    base = run(subject.wiring)
    anchors = int(base.anchors.sum())
    if anchors < LEAST_ANCHORS:
        raise BadInput(
            f"the answers hold {anchors} blocks to test",
            f"{LEAST_ANCHORS} are the least that can tell anything; answers must be longer than a block",
            "give other prompts, or raise --new-tokens",
        )
    share = (1 - settings.level) / len(finalists)
    judged = [_judge(c, base, run(c.wiring), settings, share) for c in finalists]
    blind = run(_without_context(subject))
    context = _interval(blind.log_likelihood, base.log_likelihood, base.anchors, settings.seed, share)
    return Experiment(
        target=subject.name,
        draft=subject.draft_name,
        prompts=len(prompts),
        anchors=anchors,
        length=base.acceptance_length,
        judged=tuple(sorted(judged, key=lambda j: -j.gain)),
        screened=tuple((c.change, c.detail, gain) for c, gain in screened),
        not_tried=refused,
        context_gain=_gain(blind, base),
        context_interval=context,
        margin=settings.margin,
        level=settings.level,
    )


class _Steps:
    """Tells how far it is."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self.total, self.done = report, total, 0

    def add(self) -> None:
        self.done = min(self.done + 1, self.total)
        self._report(self.done, self.total)


def _screen(
    wiring: Wiring, tried: Sequence[Candidate], choosing: Sequence[Conversation], steps: _Steps
) -> list[tuple[Candidate, float]]:
    """The gain of every variant on the choosing prompts; the worst of them are left after a glance."""

    def run(wiring: Wiring, conversations: Sequence[Conversation]) -> Scores:
        scores = replay(wiring, conversations, COARSE, greedy=False)
        steps.add()
        return scores

    base = run(wiring, choosing[:GLANCE])
    glances = [(candidate, run(candidate.wiring, choosing[:GLANCE])) for candidate in tried]
    order = sorted(range(len(tried)), key=lambda index: -_gain(base, glances[index][1]))
    kept = set(order[:KEPT])
    rest = choosing[GLANCE:]
    base_rest = run(wiring, rest)
    found = []
    for index, (candidate, scores) in enumerate(glances):
        if index in kept:
            found.append((candidate, _gain(join([base, base_rest]), join([scores, run(candidate.wiring, rest)]))))
        else:
            # What fell behind at a glance must not come back because its glance was better than another's whole.
            found.append((candidate, min(_gain(base, scores), _gain(base, glances[order[KEPT - 1]][1]))))
    return found


def _judge(candidate: Candidate, base: Scores, changed: Scores, settings: ExperimentSettings, share: float) -> Judged:
    gain = _interval(base.log_likelihood, changed.log_likelihood, base.anchors, settings.seed, share)
    length = _interval(base.accepted, changed.accepted, base.anchors, settings.seed, share)
    return Judged(
        candidate,
        _gain(base, changed),
        gain,
        changed.acceptance_length,
        changed.acceptance_length - base.acceptance_length,
        length,
        # Likelier tokens that are accepted less would be no help to anybody.
        restores=gain[0] > settings.margin and length[1] > 0,
    )


def _gain(base: Scores, changed: Scores) -> float:
    return float((changed.log_likelihood - base.log_likelihood).sum() / max(float(base.anchors.sum()), 1))


def _interval(
    base: NDArray[np.float64], changed: NDArray[np.float64], anchors: NDArray[np.float64], seed: int, share: float
) -> tuple[float, float]:
    """Percentile interval of the mean paired difference an anchor, prompts drawn again with replacement.

    Whole prompts are drawn, since the anchors of one answer are not independent; `share` lies outside.
    """
    drawn = np.random.default_rng(seed).integers(len(base), size=(RESAMPLES, len(base)))
    sums = anchors[drawn].sum(1)
    means = np.divide((changed - base)[drawn].sum(1), sums, out=np.zeros(RESAMPLES), where=sums > 0)
    low, high = np.quantile(means, [share / 2, 1 - share / 2])
    return float(low), float(high)


def _without_context(subject: Subject) -> Wiring:
    name = "context_proj.weight"
    return subject.wiring.with_tensors({name: torch.zeros_like(subject.wiring.tensors[name])})
