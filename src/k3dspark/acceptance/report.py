"""A comparison as JSON (format 1), as rows of tables, and as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3dspark.acceptance.classify import Divergence, Kind
from k3dspark.acceptance.numerics import Numerics
from k3dspark.acceptance.run import Acceptance
from k3dspark.acceptance.sampled import SampledTest
from k3dspark.acceptance.statistics import CONFIDENCE
from k3dspark.acceptance.verdict import FINDINGS, Tally
from k3dspark.page import Page

TALLY_COLUMNS = ("inputs", "run", "answers", "identical", "tokens compared")
DIVERGENCE_COLUMNS = ("input", "run", "new token", "class", "baseline", "candidate", "evidence")
TEST_COLUMNS = ("input", "token", "draws each", "distinct", "distance", "by chance", "p", "adjusted p")


def as_json(result: Acceptance) -> dict[str, Any]:
    """The stable form; `docs/accept.md` describes it."""
    verdict = result.verdict
    return {
        "format": 1,
        "baseline": {"name": result.baseline, "ids": result.sources[0].value, "cached_prompt_tokens": result.cached[0]},
        "candidate": {
            "name": result.candidate,
            "ids": result.sources[1].value,
            "cached_prompt_tokens": result.cached[1],
        },
        "settings": {
            "inputs": len(result.inputs.inputs),
            "lengths": list(result.inputs.lengths),
            "concurrency": result.plan.concurrency,
            "cache": result.plan.cache,
            "control": result.plan.control,
            "tie_limit_nats": result.plan.tie_limit,
            "draws": result.plan.draws,
            "sampling": asdict(result.plan.sampling) if result.plan.draws else None,
            "alpha": result.plan.alpha,
        },
        "notes": list(result.inputs.notes),
        "tallies": [asdict(tally) for tally in result.tallies],
        "divergences": [_divergence(divergence) for divergence in result.divergences],
        "numerics": {
            "control": _numerics(result.control),
            "candidate": _numerics(result.numerics),
            "allowed_tie_nats": result.allowed,
        },
        "sampled": [_test(test) for test in result.tests],
        "verdict": {
            "outcome": verdict.outcome.value,
            "accepted": verdict.accepted,
            "tokens": verdict.tokens,
            "mismatches": verdict.mismatches,
            "mismatch_rate_upper_bound": verdict.bound,
            "confidence": CONFIDENCE,
            "smallest_adjusted_p": verdict.smallest_p,
            "findings": [{"id": name, "what": FINDINGS[name]} for name in verdict.findings],
            "meaning": verdict.meaning,
        },
    }


def _divergence(divergence: Divergence) -> dict[str, Any]:
    entry = asdict(divergence)
    entry["kind"] = divergence.kind.value
    return entry


def _numerics(numerics: Numerics | None) -> dict[str, Any] | None:
    return asdict(numerics) | {"reading": numerics.reading} if numerics is not None else None


def _test(test: SampledTest) -> dict[str, Any]:
    entry = asdict(test)
    return {**entry.pop("test"), **entry}


def tally_row(tally: Tally) -> tuple[str, ...]:
    """Under `TALLY_COLUMNS`."""
    return tally.group, tally.run, str(tally.answers), str(tally.identical), str(tally.tokens)


def divergence_row(divergence: Divergence) -> tuple[str, ...]:
    """Under `DIVERGENCE_COLUMNS`."""
    kind = divergence.kind.value + (f" ({divergence.cause})" if divergence.cause else "")
    ids = ("–" if token is None else str(token) for token in (divergence.baseline, divergence.candidate))
    return divergence.input, divergence.run, str(divergence.at), kind, *ids, divergence.evidence


def sampled_row(found: SampledTest) -> tuple[str, ...]:
    """Under `TEST_COLUMNS`."""
    test = found.test
    return (
        found.input, str(found.position + 1), str(found.draws), str(found.distinct), f"{test.distance:.3f}",
        f"{test.null_distance:.3f}", f"{test.p:.2g}", f"{found.adjusted:.2g}",
    )  # fmt: skip


def numeric_lines(result: Acceptance) -> list[str]:
    """What the log-probabilities of agreeing tokens say, for control and candidate."""
    lines = []
    for name, numerics in (("baseline against itself", result.control), ("candidate", result.numerics)):
        if numerics is not None:
            lines.append(
                f"{name}: top-2 gaps move by {numerics.median:.2g} nats in the median, {numerics.largest:.2g} at most"
                f" ({numerics.positions} tokens): {numerics.reading}"
            )
    if any(divergence.kind in (Kind.TIE, Kind.MISMATCH) for divergence in result.divergences):
        lines.append(f"a tie is two tokens at most {result.allowed:.2g} nats apart")
    return lines


def source_lines(result: Acceptance) -> list[str]:
    """Where ids came from, when not from the engines themselves; and what was cached."""
    lines = [
        f"{name}: ids come from {'its log-probabilities' if source == 'logprobs' else 'its text, tokenized again'}"
        for name, source in (("baseline", result.sources[0]), ("candidate", result.sources[1]))
        if source != "ids"
    ]
    for name, cached in (("baseline", result.cached[0]), ("candidate", result.cached[1])):
        if cached is not None:
            lines.append(f"{name}: {cached} prompt tokens of the warm run came from its prefix cache")
    return lines


def write_page(path: Path, result: Acceptance) -> None:
    """A self-contained report."""
    verdict = result.verdict
    page = Page("Acceptance", f"candidate: {result.candidate}; baseline: {result.baseline}")
    page.text(verdict.meaning, tone="good" if verdict.accepted else "bad")
    for name in verdict.findings:
        page.text(FINDINGS[name], tone="warn")
    for note in (*result.inputs.notes, *source_lines(result)):
        page.text(note, tone="dim")
    page.heading("Compared")
    page.table(TALLY_COLUMNS, [tally_row(tally) for tally in result.tallies])
    if result.divergences:
        page.heading("Divergences")
        rows = [divergence_row(divergence) for divergence in result.divergences]
        page.table(DIVERGENCE_COLUMNS, rows, text_columns=(1, 3, 6))
    if lines := numeric_lines(result):
        page.heading("Log-probabilities where tokens agree")
        for line in lines:
            page.text(line)
    if result.tests:
        page.heading("Sampled tokens")
        page.table(TEST_COLUMNS, [sampled_row(test) for test in result.tests])
        page.text(
            "distance: total variation between the two samples; by chance: what equal distributions exceed once in"
            " twenty. p by permutation, adjusted for the number of tests (Holm).",
            tone="dim",
        )
    page.heading("What the verdict rests on")
    page.text(
        "The bound takes tokens as independent trials. Tokens of one answer are not quite: a fault that shows only in"
        " inputs unlike these is not excluded by any number of tokens."
    )
    page.write(path)
