"""The time of an engine's step out of a run of `bench`, and the cost table of `k3dspark tune` that it goes into.

A step is what brings each running request one token of the target and what it kept of its draft. Requests are timed
from their first text to their last; in between lie as many rounds as they have tokens, less the first and less those
that were accepted drafts. So this works on any server that counts accepted tokens, and on any without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.errors import BadInput, CheckFailed
from k3dspark.serving.load import Exchange

FORMAT: Final = 1
# A run shorter than this says more about its beginning and end than about steps.
FEWEST_ROUNDS: Final = 16


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of `requests` requests that each verify `length` draft tokens.

    `survival[k]` is the share of rounds that kept slots 0 … k; `prompt_seconds` what a prompt's token cost.
    """

    requests: int
    length: int
    seconds: float
    survival: tuple[float, ...]
    prompt_seconds: float


def step_time(
    exchanges: Sequence[Exchange], requests: int, length: int, accepted_per_slot: Sequence[float]
) -> StepTime:
    """One run of a closed loop in which `accepted_per_slot` draft tokens were kept. Raises `CheckFailed`."""
    good = [e for e in exchanges if e.error is None]
    if len(good) < len(exchanges) or not good:
        failed = next(e.error for e in exchanges if e.error is not None)
        raise CheckFailed("no step can be timed while requests fail", str(failed), "read the server's log")
    rounds = sum(e.new_tokens - 1 for e in good) - sum(accepted_per_slot)
    if rounds < FEWEST_ROUNDS:
        raise CheckFailed(
            f"only {rounds:g} rounds were timed",
            "the answers are too short, or other clients used the server meanwhile",
            "raise --max-tokens or --requests, and pass --ignore-eos",
        )
    seconds = sum(e.pieces[-1] - e.pieces[0] for e in good) / rounds
    first = sorted(e.pieces[0] - e.sent for e in good)[len(good) // 2]
    prompt = sum(e.prompt_tokens for e in good) / len(good)
    survival = tuple(count / rounds for count in accepted_per_slot[:length])
    return StepTime(requests, length, seconds, survival, max(first - seconds, 0.0) / max(prompt, 1.0))


def add_to_table(path: Path, measured: Sequence[StepTime], source: str) -> None:
    """Add these steps to a cost table, or begin one. Points that it has already get one more sample.

    The acceptance of the longest draft is kept as `survival`, and a prompt token's time at the smallest load. Raises
    `BadInput` for a file that is no cost table.
    """
    table: dict[str, Any] = {"format": FORMAT, "source": source, "steps": []}
    if path.exists():
        table = read_object(path)
        if table.get("format") != FORMAT or not isinstance(table.get("steps"), list):
            raise BadInput(f"{path} is no cost table", 'it has no "format": 1 and "steps"', "name another file")
    for step in measured:
        table["steps"].append({"requests": step.requests, "length": step.length, "seconds": step.seconds})
    longest = max(measured, key=lambda step: step.length)
    if len(longest.survival) >= max(len(table.get("survival", ())), 1):
        table["survival"] = list(longest.survival)
    if all(step.length == 0 for step in measured) or "prefill_seconds_per_token" not in table:
        table["prefill_seconds_per_token"] = min(measured, key=lambda step: step.requests).prompt_seconds
    write_json(path, table)
