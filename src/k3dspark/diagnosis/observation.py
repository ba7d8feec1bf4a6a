"""Acceptance of single requests (or of windows of a recording) with their context length and cached share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Observation:
    """`context_tokens` of the prompt; `cached_share` of them came from the prefix cache (None: not told)."""

    context_tokens: float
    cached_share: float | None
    rounds: float
    accepted: float


@dataclass(frozen=True)
class Pooled:
    """Acceptance length of several observations, and its standard error with requests as the independent units."""

    length: float
    error: float
    rounds: float
    count: int


def pool(observations: Sequence[Observation]) -> Pooled:
    """The ratio estimate 1 + Σ accepted / Σ rounds and its linearised standard error (Cochran 1977, §6.3)."""
    rounds = sum(o.rounds for o in observations)
    accepted = sum(o.accepted for o in observations)
    count = len(observations)
    if rounds <= 0:
        return Pooled(1.0, math.inf, 0.0, count)
    ratio = accepted / rounds
    spread = sum((o.accepted - ratio * o.rounds) ** 2 for o in observations)
    error = math.sqrt(spread * count / (count - 1)) / rounds if count > 1 else math.inf
    return Pooled(1 + ratio, error, rounds, count)


def from_responses(lines: Iterable[str], where: str) -> list[Observation]:
    """Responses saved one a line, of vLLM (--per-request-spec-decode-metrics) or of `k3dspark serve`.

    Lines without such figures are passed over. Raises `BadInput` when a line is no JSON, or no line has figures.
    """
    found = []
    total = 0
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("data:").strip()
        if not text or text == "[DONE]":
            continue
        total += 1
        try:
            response = json.loads(text)
        except ValueError as error:
            raise BadInput(
                f"{where}, line {number}, is no JSON", str(error)[:200], "save each response as one line of JSON"
            ) from error
        if isinstance(response, dict) and (observation := _of_response(response)) is not None:
            found.append(observation)
    if not found:
        raise BadInput(
            f"{where} holds no acceptance figures",
            f"none of its {total} responses has usage and metrics.speculative_decoding",
            "start vLLM with --per-request-spec-decode-metrics summary, and with stream_options include_usage",
        )
    return found


def _of_response(response: Mapping[str, Any]) -> Observation | None:
    usage = _mapping(response.get("usage"))
    speculation = _mapping(_mapping(response.get("metrics")).get("speculative_decoding"))
    prompt = _number(usage.get("prompt_tokens"))
    counts = _counts(speculation, _number(usage.get("completion_tokens")))
    if prompt is None or counts is None:
        return None
    cached = _number(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    share = cached / prompt if cached is not None and prompt > 0 else None
    return Observation(prompt, share, *counts)


def _counts(speculation: Mapping[str, Any], completion: float | None) -> tuple[float, float] | None:
    """(rounds, accepted): as they are told, from the steps, or from the mean length and the number of tokens."""
    rounds, accepted = _number(speculation.get("rounds")), _number(speculation.get("accepted_tokens"))
    if rounds is not None and accepted is not None:
        return (rounds, accepted) if rounds > 0 else None
    steps = speculation.get("per_step_accepted")
    if isinstance(steps, list) and steps and all(_number(step) is not None for step in steps):
        return float(len(steps)), float(sum(steps))
    length = _number(speculation.get("mean_acceptance_length"))
    if length is None or completion is None or length < 1 or completion <= 1:
        return None
    # The first token comes from the prompt; the others in rounds of `length` tokens.
    estimated = (completion - 1) / length
    return estimated, (length - 1) * estimated


def from_recording(documents: Iterable[Mapping[str, Any]], model: str) -> list[Observation]:
    """Windows of a recording (`monitor --json`): mean prompt length and prefix hits stand for those of its requests."""
    found = []
    for document in documents:
        for entry in document.get("models", ()):
            rounds, accepted = _number(entry.get("rounds")), _number(entry.get("accepted"))
            prompt = _number(entry.get("mean_prompt_tokens"))
            if entry.get("model") == model and rounds and accepted is not None and prompt is not None:
                found.append(Observation(prompt, _number(entry.get("prefix_hit_ratio")), rounds, accepted))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """A finite number that is not negative, else None; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
