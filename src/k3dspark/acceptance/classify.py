"""Where two answers divide, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from k3dspark.acceptance.asking import Answer, Source
from k3dspark.acceptance.inputs import Input
from k3dspark.acceptance.numerics import common, gap


class Kind(StrEnum):
    """What a divergence is. TIE and VARIANCE are explained by the engine's own rounding; the others are not."""

    TIE = "tie"
    VARIANCE = "variance"
    STOP = "stop"
    PROMPT = "prompt"
    MISMATCH = "mismatch"


EXPLAINED = (Kind.TIE, Kind.VARIANCE)


@dataclass(frozen=True)
class Divergence:
    """The first token of an answer that differs. `cause` narrows a mismatch down: "sampled", "isolated" or ""."""

    input: str
    group: str
    run: str  # "cold", "warm", "stop" or "resumed"
    at: int  # index of the new token
    kind: Kind
    evidence: str
    baseline: int | None = None  # token ids; None where an answer has ended
    candidate: int | None = None
    cause: str = ""
    facts: dict[str, float | int | str | None] = field(default_factory=dict)


def same(a: Answer, b: Answer) -> bool:
    """Equal tokens, text and end. An end token that only one side lists is a convention, not a difference."""
    if a.finish != b.finish or not prompts_agree(a, b):
        return False
    if a.token_ids == b.token_ids:
        return texts_agree(a, b)
    shorter, longer = sorted((a.token_ids, b.token_ids), key=len)
    return texts_agree(a, b) and a.finish == "stop" and len(longer) - len(shorter) == 1 and longer[:-1] == shorter


def texts_agree(a: Answer, b: Answer) -> bool:
    """But for spaces at the ends and half a character at the last: there detokenizers have their ways."""
    one, other = (answer.text.rstrip("\ufffd").strip() for answer in (a, b))
    return one == other


def prompts_agree(a: Answer, b: Answer) -> bool:
    """As far as both sides say what they read."""
    if a.prompt_ids is not None and b.prompt_ids is not None:
        return a.prompt_ids == b.prompt_ids
    return a.prompt_tokens is None or b.prompt_tokens is None or a.prompt_tokens == b.prompt_tokens


def classify(
    given: Input, run: str, baselines: Sequence[Answer], candidate: Answer, allowed: float
) -> Divergence | None:
    """The divergence of a candidate from the baseline's answers (the first, and repeated ones); None for none.

    `allowed` is the widest gap in nats that counts as a tie (`numerics.allowance`).
    """
    first = baselines[0]
    if same(first, candidate):
        return None
    if not prompts_agree(first, candidate):
        return _prompt(given, run, first, candidate)
    nearest = max(
        baselines, key=lambda answer: (same(answer, candidate), common(answer.token_ids, candidate.token_ids))
    )
    at = common(first.token_ids, candidate.token_ids)
    here = (first.token_ids[at] if at < len(first.token_ids) else None,
            candidate.token_ids[at] if at < len(candidate.token_ids) else None)  # fmt: skip
    repeated = [common(first.token_ids, other.token_ids) for other in baselines[1:] if not same(first, other)]
    if same(nearest, candidate):
        return Divergence(given.name, given.group, run, at, Kind.VARIANCE,
                          "the baseline, asked again, gave exactly this answer too", *here)  # fmt: skip
    at = common(nearest.token_ids, candidate.token_ids)
    ours = nearest.token_ids[at] if at < len(nearest.token_ids) else None
    theirs = candidate.token_ids[at] if at < len(candidate.token_ids) else None
    if ours is None or theirs is None:
        return _ended(given, run, at, nearest, candidate, ours, theirs)
    if at in repeated:
        return Divergence(given.name, given.group, run, at, Kind.VARIANCE,
                          "the baseline's own answers divide at this token too", ours, theirs)  # fmt: skip
    return _by_gaps(given, run, at, nearest, candidate, allowed)


def _prompt(given: Input, run: str, first: Answer, candidate: Answer) -> Divergence:
    facts: dict[str, float | int | str | None] = {
        "baseline_prompt_tokens": first.prompt_tokens, "candidate_prompt_tokens": candidate.prompt_tokens,
    }  # fmt: skip
    evidence = f"the sides read other prompts: {first.prompt_tokens} and {candidate.prompt_tokens} tokens"
    if first.prompt_ids is not None and candidate.prompt_ids is not None:
        place = common(first.prompt_ids, candidate.prompt_ids)
        facts["prompt_differs_at"] = place
        evidence += f", different from token {place} of the prompt on"
    return Divergence(
        given.name, given.group, run, common(first.token_ids, candidate.token_ids), Kind.PROMPT, evidence, facts=facts
    )


def _ended(given: Input, run: str, at: int, a: Answer, b: Answer, ours: int | None, theirs: int | None) -> Divergence:
    if len(a.token_ids) == len(b.token_ids):
        what = "equal tokens, but other texts" if not texts_agree(a, b) else "equal tokens, but other reasons to end"
    else:
        side = "candidate" if len(b.token_ids) < len(a.token_ids) else "baseline"
        what = f"the {side} has {abs(len(a.token_ids) - len(b.token_ids))} tokens less, and no other difference"
    evidence = (
        f"{what}; baseline ended by {a.finish} after {len(a.token_ids)},"
        f" candidate by {b.finish} after {len(b.token_ids)}"
    )
    if a.text != b.text:
        place = common([ord(c) for c in a.text], [ord(c) for c in b.text])
        evidence += f"; texts end …{a.text[max(place - 12, 0) :][:40]!r} and …{b.text[max(place - 12, 0) :][:40]!r}"
    facts: dict[str, float | int | str | None] = {"baseline_finish": a.finish, "candidate_finish": b.finish}
    return Divergence(given.name, given.group, run, at, Kind.STOP, evidence, ours, theirs, facts=facts)


def _by_gaps(given: Input, run: str, at: int, a: Answer, b: Answer, allowed: float) -> Divergence:
    ours, theirs = a.token_ids[at], b.token_ids[at]
    of_a, of_b = (answer.scores[at] if at < len(answer.scores) else None for answer in (a, b))
    gap_a = gap(of_a, ours, theirs) if of_a else None
    gap_b = gap(of_b, theirs, ours) if of_b else None
    own = of_b.best[0][0] if of_b and of_b.best else None
    facts: dict[str, float | int | str | None] = {
        "baseline_gap": gap_a, "candidate_gap": gap_b, "allowed_gap": allowed, "candidate_own_best": own,
    }  # fmt: skip

    def found(kind: Kind, evidence: str) -> Divergence:
        if Source.TEXT in (a.source, b.source):
            evidence += (
                "; ids come from text that was tokenized again, so this may be no more than another tokenization"
            )
        return Divergence(given.name, given.group, run, at, kind, evidence, ours, theirs, facts=facts)

    if gap_a is not None and gap_b is not None and gap_a >= 0 and gap_b >= 0 and gap_a + gap_b <= allowed:
        return found(
            Kind.TIE,
            f"the two tokens are {gap_a:.2g} nats apart for the baseline and {gap_b:.2g} for the candidate; elsewhere"
            f" rounding moves such gaps too (allowed: {allowed:.2g})",
        )
    if own is not None and own != theirs and own == ours:
        last = at == len(a.token_ids) - 1 and a.finish == "stop"
        if last:
            return found(
                Kind.STOP, "by its own log-probabilities the candidate should have ended here, as the baseline did"
            )
        assert of_b is not None
        return found(
            Kind.MISMATCH,
            f"by the candidate's own log-probabilities the baseline's token is best, by"
            f" {of_b.best[0][1] - of_b.chosen:.2g} nats: it did not give its best token",
        )
    if of_a is None or of_b is None:
        missing = "baseline" if of_a is None else "candidate"
        return found(Kind.MISMATCH, f"the {missing} gives no log-probabilities, so a tie cannot be shown")
    parts = [
        f"{name} prefers its token by " + (f"{value:.2g} nats" if value is not None else "more than its best few show")
        for name, value in (("the baseline", gap_a), ("the candidate", gap_b))
    ]
    return found(Kind.MISMATCH, f"{parts[0]}, {parts[1]}; a tie would be at most {allowed:.2g} together")
