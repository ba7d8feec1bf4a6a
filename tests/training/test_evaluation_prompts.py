"""The 200 prompts a draft is judged on: written by hand, balanced, and apart from everything it trains on."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from k3dspark.target.weights import LlamaWeights
from k3dspark.training.prompts import OPENINGS, normalized, overlaps, template_prompt
from small_training import regenerator

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"


def entries(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (PROMPTS / name).read_text(encoding="utf-8").splitlines()]


EVALUATION = [entry["prompt"] for entry in entries("evaluation.jsonl")]


def test_five_domains_have_forty_prompts_each_and_none_is_there_twice() -> None:
    assert Counter(entry["domain"] for entry in entries("evaluation.jsonl")) == {
        "question": 40, "arithmetic": 40, "code": 40, "rewriting": 40, "chat": 40,
    }  # fmt: skip
    assert len({normalized(prompt) for prompt in EVALUATION}) == 200
    repeated = [p for i, p in enumerate(EVALUATION) if overlaps(p, EVALUATION[:i] + EVALUATION[i + 1 :])]
    assert repeated == []


def test_the_held_out_prompts_are_among_them() -> None:
    assert [e for e in entries("held_out.jsonl") if e not in entries("evaluation.jsonl")] == []


def test_no_training_template_comes_near_them() -> None:
    """Not because the filter throws overlaps away: the templates never make one."""
    rng = random.Random(0)
    made = {template_prompt(rng) for _ in range(700)}
    assert [prompt for prompt in made if overlaps(prompt, EVALUATION)] == []


def test_no_opening_is_a_whole_prompt() -> None:
    assert {normalized(p) for p in EVALUATION}.isdisjoint(normalized(opening) for opening in OPENINGS)


def test_the_generator_emits_no_overlapping_prompt_when_told_of_them(weights: LlamaWeights) -> None:
    """Passages to rewrite come from answers, which may quote anything: here every one quotes an evaluation prompt."""
    source = regenerator(weights, held_out=EVALUATION)
    source._texts = list(EVALUATION)
    emitted = [prompt for _ in range(20) for prompt in source._prompts()]
    assert len(emitted) > 50
    assert [prompt for prompt in emitted if overlaps(prompt, EVALUATION)] == []
    unguarded = regenerator(weights)
    unguarded._texts = list(EVALUATION)
    assert any(overlaps(prompt, EVALUATION) for _ in range(20) for prompt in unguarded._prompts())
