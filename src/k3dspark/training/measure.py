"""Acceptance of a draft on prompts, by DeepSpec's protocol (spec §F.8): what `k3dspark evaluate` reports.

One request at a time, the whole block verified, counters pooled over requests. A prompt's own seed comes from its
place in its file, so limits and filters never change what is measured on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from k3dspark.decoding import DecodeStats, Engine, FullBlock, Load, Outcome, SamplingParams
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput
from k3dspark.training.reliability import BINS, CurveBin, Reliability, reliability, reliability_curve

RESAMPLES = 2000
ALL = "all"


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt, its domain, and its number among all prompts of the files, which fixes its seed."""

    domain: str
    text: str
    number: int


@dataclass(frozen=True)
class MeasureSettings:
    """What is asked of every prompt; `temperature` 0 is greedy."""

    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 980406  # DeepSpec's
    verifier: Literal["block", "token"] = "block"


@dataclass(frozen=True)
class Rounds:
    """Every round of one or more requests: confidence logits fp32 [R, K], draft tokens verified and accepted [R]."""

    confidence: Tensor
    verified: Tensor
    accepted: Tensor

    @staticmethod
    def join(parts: Sequence[Rounds]) -> Rounds:
        return Rounds(
            *(torch.cat([getattr(p, name) for p in parts]) for name in ("confidence", "verified", "accepted"))
        )


@dataclass(frozen=True)
class Measured:
    """One prompt's generation."""

    prompt: EvaluationPrompt
    stats: DecodeStats
    rounds: Rounds


@dataclass(frozen=True)
class SlotReliability:
    """How far the confidence head can be believed, over all slots and slot by slot (None where never observed).

    `conditional`: c_k against "slot k accepted", where all slots before it were. `survival`: c_1 … c_k multiplied
    against "at least k accepted", in every round that verified slot k; schedulers use this one.
    """

    conditional: Reliability | None
    survival: Reliability | None
    conditional_by_slot: list[Reliability | None]
    survival_by_slot: list[Reliability | None]
    conditional_curve: list[CurveBin]
    survival_curve: list[CurveBin]


@dataclass(frozen=True)
class Group:
    """Pooled figures of one domain, or of all."""

    name: str
    prompts: int
    stats: DecodeStats
    interval: tuple[float, float]  # of the acceptance length, 95 %, bootstrap over prompts
    confidence: SlotReliability | None  # None: the draft has no confidence head


# -- prompts ---------------------------------------------------------------------------------------------------------


def read_evaluation_prompts(
    paths: Sequence[Path], domains: Sequence[str] = (), limit: int | None = None
) -> list[EvaluationPrompt]:
    """Prompts of JSON-lines files ("prompt", and "domain" or else the file's name) or of text files, one a line.

    `domains` keeps these only; `limit` keeps the first so many of each domain. Raises `BadInput` when a file cannot
    be read, when a domain is in none of them, or when nothing is left.
    """
    found = [entry for path in paths for entry in _read(path)]
    prompts = [EvaluationPrompt(domain, text, number) for number, (domain, text) in enumerate(found)]
    there = list(dict.fromkeys(p.domain for p in prompts))
    unknown = next((d for d in domains if d not in there), None)
    if unknown is not None:
        raise BadInput(f"no prompt of domain {unknown!r}", f"the files have {', '.join(there)}", "name one of these")
    kept: list[EvaluationPrompt] = []
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        if (not domains or prompt.domain in domains) and (limit is None or counts[prompt.domain] <= limit):
            kept.append(prompt)
    if not kept:
        raise BadInput("no prompts", "the files hold none", "pass a file with at least one prompt")
    return kept


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}", str(error), "pass a UTF-8 text or JSON-lines file") from error
    if path.suffix != ".jsonl":
        return [(path.stem, line.strip()) for line in lines]
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}, line {number}: not JSON", str(error), "see docs/evaluate.md") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
            raise BadInput(
                f"{path}, line {number}: no prompt",
                'each line is an object with "prompt", a text, and possibly "domain"',
                "see docs/evaluate.md",
            )
        domain = entry.get("domain")
        if domain == ALL:
            raise BadInput(f"{path}, line {number}: domain {ALL!r}", "this names the whole", "choose another name")
        entries.append((domain if isinstance(domain, str) and domain else path.stem, entry["prompt"]))
    return entries


# -- measuring -------------------------------------------------------------------------------------------------------


class _Recorder(FullBlock):
    """Verifies the whole block and keeps what the confidence head said and what came of it."""

    def __init__(self) -> None:
        self._confidence: list[Tensor] = []
        self._outcomes: list[tuple[int, int]] = []

    def lengths(self, confidence: Tensor, load: Load) -> tuple[int, ...]:
        self._confidence.append(confidence)
        return super().lengths(confidence, load)

    def observe(self, outcome: Outcome) -> None:
        self._outcomes.append((outcome.verified[0], outcome.accepted[0]))

    def rounds(self, committed: int, slots: int) -> Rounds:
        """The rounds of the one request that has run, which committed so many draft tokens; then forget them.

        A stop token inside the accepted prefix ends what was observed: it was accepted, and what the target said
        about a text that goes on behind it belongs to no answer.
        """
        kept = [(c, v, a) for c, (v, a) in zip(self._confidence, self._outcomes, strict=True) if v]
        verified, accepted = [v for _, v, _ in kept], [a for _, _, a in kept]
        if sum(accepted) > committed:
            last = committed - sum(accepted[:-1]) + 1
            verified[-1] = accepted[-1] = last
        rows = torch.cat([c.float().cpu() for c, _, _ in kept]) if kept else torch.empty(0, slots)
        self._confidence, self._outcomes = [], []
        return Rounds(rows, torch.tensor(verified, dtype=torch.long), torch.tensor(accepted, dtype=torch.long))


def measure(
    pair: ModelPair,
    prompts: Sequence[EvaluationPrompt],
    settings: MeasureSettings,
    report: Callable[[Measured], None] = lambda _: None,
) -> list[Measured]:
    """Answer every prompt with the pair's chat template, scheduler off; `report` is called after each."""
    if pair.draft is None:
        raise BadInput("no draft", "acceptance is a draft's", "pass a draft")
    recorder = _Recorder()
    engine = Engine(pair.target, pair.draft, recorder)
    done = []
    for prompt in prompts:
        params = SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=pair.stop_ids,
            temperature=settings.temperature,
            seed=prompt_seed(settings.seed, prompt.number),
            verifier=settings.verifier,
        )
        stats = engine.generate(pair.chat_ids(prompt.text), params).stats
        done.append(Measured(prompt, stats, recorder.rounds(stats.accepted, pair.draft.block_size)))
        report(done[-1])
    return done


def prompt_seed(seed: int, number: int) -> int:
    """Seeds of different prompts and of different runs do not meet."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


# -- figures ---------------------------------------------------------------------------------------------------------


def groups(measured: Sequence[Measured], with_confidence: bool, seed: int, bins: int = BINS) -> list[Group]:
    """All prompts first, then each domain in the order of the files; one domain alone is not repeated."""
    names = list(dict.fromkeys(m.prompt.domain for m in measured))
    parts = [(ALL, list(measured))]
    if len(names) > 1:
        parts += [(name, [m for m in measured if m.prompt.domain == name]) for name in names]
    return [
        Group(
            name=name,
            prompts=len(part),
            stats=sum((m.stats for m in part), DecodeStats()),
            interval=bootstrap_interval([m.stats for m in part], seed),
            confidence=slot_reliability(Rounds.join([m.rounds for m in part]), bins) if with_confidence else None,
        )
        for name, part in parts
    ]


def bootstrap_interval(stats: Sequence[DecodeStats], seed: int, share: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the pooled acceptance length when prompts are drawn again with replacement."""
    accepted, rounds = (np.array([getattr(s, name) for s in stats], float) for name in ("accepted", "rounds"))
    drawn = np.random.default_rng(seed).integers(len(stats), size=(RESAMPLES, len(stats)))
    sums = rounds[drawn].sum(1)
    lengths = 1 + np.divide(accepted[drawn].sum(1), sums, out=np.zeros(RESAMPLES), where=sums > 0)
    low, high = np.quantile(lengths, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def slot_reliability(rounds: Rounds, bins: int = BINS) -> SlotReliability:
    """Reliability of the confidence head as it is, before any calibration."""
    step = rounds.confidence.double().sigmoid()  # [R, K]
    slots = torch.arange(step.shape[1])
    held = slots < rounds.accepted[:, None]  # "at least k accepted"
    observed = slots < rounds.verified[:, None]
    reached = observed & (slots <= rounds.accepted[:, None])
    survival = step.cumprod(1)

    def by_slot(predicted: Tensor, mask: Tensor) -> list[Reliability | None]:
        return [reliability(predicted[mask[:, k], k], held[mask[:, k], k], bins) for k in slots.tolist()]

    return SlotReliability(
        conditional=reliability(step[reached], held[reached], bins),
        survival=reliability(survival[observed], held[observed], bins),
        conditional_by_slot=by_slot(step, reached),
        survival_by_slot=by_slot(survival, observed),
        conditional_curve=reliability_curve(step[reached], held[reached], bins),
        survival_curve=reliability_curve(survival[observed], held[observed], bins),
    )


# -- plain data ------------------------------------------------------------------------------------------------------


def measurement_record(
    pair: ModelPair, draft: str, found: Sequence[tuple[MeasureSettings, Sequence[Group]]]
) -> dict[str, Any]:
    """Everything as JSON data: what was measured, and one entry for each sampling setting, all at one seed."""
    assert pair.draft is not None
    first = found[0][0]
    return {
        "target": pair.name,
        "draft": draft,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "block_size": pair.draft.block_size,
        "max_new_tokens": first.max_new_tokens,
        "verifier": first.verifier,
        "seed": first.seed,
        "settings": [
            {"temperature": settings.temperature, "groups": {g.name: group_record(g) for g in members}}
            for settings, members in found
        ],
    }


def group_record(group: Group) -> dict[str, Any]:
    """A group as JSON data; the fields are documented in docs/evaluate.md."""
    stats = group.stats
    return {
        "prompts": group.prompts,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "new_tokens": stats.new_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_length_interval": list(group.interval),
        "acceptance_rate": stats.acceptance_rate,
        "per_slot_acceptance": list(stats.per_slot_acceptance),
        "conditional_acceptance": list(stats.conditional_acceptance),
        "tokens_per_second": stats.tokens_per_second,
        "confidence": None if group.confidence is None else _confidence_record(group.confidence),
    }


def _confidence_record(confidence: SlotReliability) -> dict[str, Any]:
    return {
        kind: {
            "all": _plain(getattr(confidence, kind)),
            "per_slot": [_plain(r) for r in getattr(confidence, f"{kind}_by_slot")],
            "curve": [vars(b) for b in getattr(confidence, f"{kind}_curve")],
        }
        for kind in ("conditional", "survival")
    }


def _plain(figures: Reliability | None) -> dict[str, Any] | None:
    return None if figures is None else dict(vars(figures))
