"""The packaged pair on forty prompts: no schedule and no verifier changes a greedy token, company changes none at all.

About ten minutes on two idle cores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from k3dspark.decoding import CostAware, Engine, FixedLength, FullBlock, SamplingParams, Scheduler, Threshold
from k3dspark.decoding.costs import StepCosts, measure
from k3dspark.embedded.pair import ModelPair, load_embedded_pair

pytestmark = [pytest.mark.integration, pytest.mark.long]

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "held_out.jsonl"
MAKE: dict[str, Callable[[StepCosts], Scheduler]] = {
    "full": lambda _: FullBlock(),
    "fixed": lambda _: FixedLength(3),
    "threshold": lambda _: Threshold(0.1),
    "cost, early stop": lambda costs: CostAware(costs, "early_stop", alone=True),
    "cost, capacity": lambda costs: CostAware(costs, "capacity", alone=True),
}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_embedded_pair()


@pytest.fixture(scope="module")
def prompts(pair: ModelPair) -> list[list[int]]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 40
    return [pair.chat_ids(json.loads(line)["prompt"]) for line in lines]


@pytest.fixture(scope="module")
def costs(pair: ModelPair) -> StepCosts:
    return measure(pair.target, pair.draft, repeats=5)


def decode(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """New tokens of all prompts, eight at a time."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), 8):
        pairs = zip(prompts[start : start + 8], params[start : start + 8], strict=True)
        requests = [engine.submit(ids, own) for ids, own in pairs]
        while not engine.idle:
            engine.step()
        found += [request.new_ids for request in requests]
    return found


@pytest.fixture(scope="module")
def plain(pair: ModelPair, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=48, stop_token_ids=pair.stop_ids)
    engine = Engine(pair.target, exact=True)
    return [list(engine.generate(ids, params).token_ids) for ids in prompts]


@pytest.mark.parametrize("name", MAKE)
def test_forty_greedy_answers_are_those_of_plain_decoding(
    pair: ModelPair, prompts: list[list[int]], plain: list[list[int]], costs: StepCosts, name: str
) -> None:
    engine = Engine(pair.target, pair.draft, MAKE[name](costs), exact=True)
    params = [
        SamplingParams(max_new_tokens=48, stop_token_ids=pair.stop_ids, verifier="token" if i % 2 else "block")
        for i in range(len(prompts))
    ]
    assert decode(engine, prompts, params) == plain


@pytest.mark.parametrize("name", MAKE)
def test_eight_sampled_answers_are_the_same_alone_and_together(
    pair: ModelPair, prompts: list[list[int]], costs: StepCosts, name: str
) -> None:
    params = [
        SamplingParams(
            max_new_tokens=32,
            stop_token_ids=pair.stop_ids,
            temperature=(0.7, 1.0)[i % 2],
            top_p=(0.95, 1.0)[i // 2 % 2],
            verifier="token" if i // 4 else "block",
            seed=i,
        )
        for i in range(8)
    ]
    together = decode(Engine(pair.target, pair.draft, MAKE[name](costs), exact=True), prompts[:8], params)
    for ids, own, expected in zip(prompts[:8], params, together, strict=True):
        alone = Engine(pair.target, pair.draft, MAKE[name](costs), exact=True)
        assert list(alone.generate(ids, own).token_ids) == expected
