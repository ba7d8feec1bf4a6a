"""The packaged pair under every schedule: greedy tokens are the target's own, sampled ones a matter of the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from k3dspark.decoding import (
    CostAware,
    Engine,
    FixedLength,
    FullBlock,
    SamplingParams,
    Scheduler,
    StepCosts,
    Threshold,
)
from k3dspark.embedded.pair import ModelPair, load_embedded_pair

# A curve with a step, so that lengths vary whatever this machine costs.
COSTS = StepCosts.synthetic(60.0, 2.0, 1, step=2, draft=12.0)
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "full": FullBlock,
    "fixed": lambda: FixedLength(3),
    "threshold": lambda: Threshold(0.2),
    "cost, early stop": lambda: CostAware(COSTS, "early_stop", alone=True),
    "cost, capacity": lambda: CostAware(COSTS, "capacity", alone=True),
}
PROMPTS = ("What is the capital of France?", "Write a Python function that adds two numbers.", "Hello!")


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return load_embedded_pair()


def answers(
    pair: ModelPair, scheduler: Scheduler | None, prompts: tuple[str, ...], params: tuple[SamplingParams, ...]
) -> list[list[int]]:
    """New tokens of each prompt, all decoded together in exact mode; without a scheduler, plainly."""
    engine = Engine(pair.target, pair.draft if scheduler else None, scheduler, exact=True)
    pairs = zip(prompts, params, strict=True)
    requests = [engine.submit(pair.chat_ids(prompt), own) for prompt, own in pairs]
    while not engine.idle:
        engine.step()
    return [request.new_ids for request in requests]


@pytest.fixture(scope="module")
def plain(pair: ModelPair) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=16, stop_token_ids=pair.stop_ids)
    return [tokens for prompt in PROMPTS for tokens in answers(pair, None, (prompt,), (params,))]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_greedy_tokens_are_those_of_plain_decoding(pair: ModelPair, plain: list[list[int]], name: str) -> None:
    block = SamplingParams(max_new_tokens=16, stop_token_ids=pair.stop_ids)
    assert answers(pair, SCHEDULERS[name](), PROMPTS, (block, replace(block, verifier="token"), block)) == plain


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_seed_gives_the_same_tokens_alone_and_in_company(pair: ModelPair, name: str) -> None:
    block = SamplingParams(max_new_tokens=10, temperature=1.0, top_p=0.95, seed=11)
    token = replace(block, temperature=0.7, seed=12, verifier="token")
    together = answers(pair, SCHEDULERS[name](), PROMPTS, (block, token, replace(block, temperature=0.0)))
    for prompt, params, expected in zip(PROMPTS[:2], (block, token), together[:2], strict=True):
        assert answers(pair, SCHEDULERS[name](), (prompt,), (params,)) == [expected]
