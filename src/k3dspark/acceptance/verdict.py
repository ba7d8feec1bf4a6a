"""From divergences and tests to a verdict, and what it means in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3dspark.acceptance.classify import EXPLAINED, Divergence, Kind
from k3dspark.acceptance.numerics import Numerics
from k3dspark.acceptance.sampled import SampledTest
from k3dspark.acceptance.statistics import CONFIDENCE, upper_bound

WEAK = 0.3  # total variation that chance alone reaches, in the median test, from which draws are too few


class Outcome(StrEnum):
    """IDENTICAL and EXPLAINED accept the candidate; DIFFERENT and INCONCLUSIVE do not."""

    IDENTICAL = "identical"
    EXPLAINED = "explained"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Tally:
    """Answers of one group in one run. `tokens` were compared after equal tokens, the divergent ones included."""

    group: str
    run: str
    answers: int
    identical: int
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """`tokens` of all tallies; `bound` is the upper limit of the rate of real mismatches, one-sided, at 95 %."""

    outcome: Outcome
    tokens: int
    mismatches: int
    bound: float
    findings: tuple[str, ...]
    alpha: float
    smallest_p: float | None

    @property
    def accepted(self) -> bool:
        return self.outcome in (Outcome.IDENTICAL, Outcome.EXPLAINED)

    @property
    def meaning(self) -> str:
        """The verdict in words."""
        words = {
            Outcome.IDENTICAL: f"identical: {self.tokens} tokens compared, none differs",
            Outcome.EXPLAINED: f"explained: {self.tokens} tokens compared; every difference is a tie within rounding"
            " or also in the control",
            Outcome.DIFFERENT: f"different: {self.tokens} tokens compared, {self.mismatches} real mismatches",
            Outcome.INCONCLUSIVE: f"inconclusive: {self.tokens} tokens compared, but the baseline cannot serve as one",
        }
        text = words[self.outcome] if self.tokens else f"{self.outcome.value}: sampled answers only"
        if self.tokens:
            text += f"; a mismatch rate above {self.bound:.2g} a token is excluded at {CONFIDENCE:.0%}"
        if self.smallest_p is not None:
            held = "no difference" if self.smallest_p >= self.alpha else "a difference"
            text += f"; sampled: {held} of distributions (smallest adjusted p {self.smallest_p:.2g})"
        return text


FINDINGS = {
    "baseline_unsteady": "the baseline, asked twice, gave answers that rounding does not explain: it is no baseline",
    "baseline_sampled": "the baseline often gave tokens that are not its own best: it does not decode greedily",
    "candidate_sampled": "the candidate often gave tokens that are not its own best: it samples instead of decoding"
    " greedily (a temperature, or top-p, that slipped in)",
    "numerics": "log-probabilities differ by more than the baseline's own vary: another dtype, quantisation or kernel",
    "other_model": "tokens or log-probabilities differ by more than rounding of any format: other weights or another"
    " model",
    "template": "conversations are read differently: compare chat templates and tokenizers of both sides",
    "stop": "answers end differently: compare end tokens, stop strings and what is cut with them",
    "no_stop_probe": "no answer had text to take a stop string from: how answers stop was not compared",
    "retokenized": "ids of a side come from its text, tokenized again: less certain than its own ids",
    "weak_draws": "so few draws for so many tokens that only large differences of distributions would be seen: raise"
    " --draws",
    "distribution": "sampled tokens do not come from one distribution",
    "cache_unseen": "asked again, no side took a prompt from its prefix cache, or it does not say so:"
    " the cache was not seen at work",
    "not_cold": "prompts came from the prefix cache although they were new: the server shares across salts,"
    " so a cold run was not cold",
}


def decide(
    tallies: Sequence[Tally],
    divergences: Sequence[Divergence],
    tests: Sequence[SampledTest],
    findings: Sequence[str],
    alpha: float,
) -> Verdict:
    """The verdict over a whole run."""
    real = [d for d in divergences if d.kind not in EXPLAINED]
    smallest = min((test.adjusted for test in tests), default=None)
    rejected = smallest is not None and smallest < alpha
    told = list(findings) + (["distribution"] if rejected else [])
    if tests and not rejected and sorted(test.test.null_distance for test in tests)[len(tests) // 2] > WEAK:
        told.append("weak_draws")
    if any(d.kind is Kind.STOP for d in real):
        told.append("stop")
    if any(d.kind is Kind.PROMPT for d in real):
        told.append("template")
    if "baseline_unsteady" in told or "baseline_sampled" in told:
        outcome = Outcome.INCONCLUSIVE
    elif real or rejected:
        outcome = Outcome.DIFFERENT
    else:
        outcome = Outcome.EXPLAINED if divergences else Outcome.IDENTICAL
    tokens = sum(tally.tokens for tally in tallies)
    mismatches = sum(d.kind is Kind.MISMATCH for d in real)
    return Verdict(
        outcome, tokens, mismatches, upper_bound(mismatches, tokens), tuple(dict.fromkeys(told)), alpha, smallest
    )


def numeric_findings(control: Numerics | None, candidate: Numerics | None) -> list[str]:
    """What log-probabilities alone say about the two sides."""
    if candidate is None:
        return []
    if candidate.p99 > 0.7:
        return ["other_model"]
    own = control.p99 if control is not None else 0.0
    return ["numerics"] if candidate.p99 > max(2e-3, 5 * own) else []
