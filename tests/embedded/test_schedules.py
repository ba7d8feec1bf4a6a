"""The packaged pair under every schedule: greedy tokens are the target's own, sampled ones a matter of the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal

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
VERIFIERS: tuple[Literal["block", "token"], ...] = ("block", "token")


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
    params = SamplingParams(max_new_tokens=20, stop_token_ids=pair.stop_ids)
    return [tokens for prompt in PROMPTS for tokens in answers(pair, None, (prompt,), (params,))]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_greedy_tokens_are_those_of_plain_decoding(
    pair: ModelPair, plain: list[list[int]], name: str, verifier: Literal["block", "token"]
) -> None:
    params = SamplingParams(max_new_tokens=20, stop_token_ids=pair.stop_ids, verifier=verifier)
    assert answers(pair, SCHEDULERS[name](), PROMPTS, (params,) * len(PROMPTS)) == plain


@pytest.mark.parametrize(("name", "verifier"), product(SCHEDULERS, VERIFIERS))
def test_a_seed_gives_the_same_tokens_alone_and_in_company(
    pair: ModelPair, name: str, verifier: Literal["block", "token"]
) -> None:
    first = SamplingParams(max_new_tokens=14, temperature=1.0, top_p=0.95, seed=11, verifier=verifier)
    company = (first, replace(first, seed=12, temperature=0.7), replace(first, temperature=0.0))
    (alone,) = answers(pair, SCHEDULERS[name](), PROMPTS[:1], (first,))
    together = answers(pair, SCHEDULERS[name](), PROMPTS, company)
    assert together[0] == alone
