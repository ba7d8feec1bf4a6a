"""Sampled answers of a real server with and without its draft, and one wrong token in ten thousand at full length."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceptance.planted import served, temperature, wrong_token
from k3dspark.acceptance.asking import Sampling
from k3dspark.acceptance.inputs import built_in
from k3dspark.acceptance.run import Plan, accept
from k3dspark.acceptance.verdict import Outcome
from k3dspark.embedded.pair import ModelPair, load_pair
from tiny_models import write_pair

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_pair(root)


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> ModelPair:
    return load_pair(*directories, dtype="float32")


def test_draws_with_a_draft_are_draws_of_the_target(directories: tuple[Path, Path], pair: ModelPair) -> None:
    plan = Plan(concurrency=8, greedy=False, draws=300, sampling=Sampling(0.3, 1.0, 3))
    with served(load_pair(directories[0], None, dtype="float32"), concurrency=8) as plain:
        inputs = built_in((24,), 3, 4, plain.tokenizer, chat=False)
        with served(pair, concurrency=8) as candidate:
            result = accept(plain, candidate, inputs, plan)
        assert result.verdict.outcome is Outcome.IDENTICAL, result.tests
        with served(pair, temperature(0.6), concurrency=8) as candidate:
            result = accept(plain, candidate, inputs, plan)
        assert result.verdict.outcome is Outcome.DIFFERENT
        assert "distribution" in result.verdict.findings


def test_one_wrong_token_among_more_than_ten_thousand(directories: tuple[Path, Path], pair: ModelPair) -> None:
    with served(load_pair(directories[0], None, dtype="float32"), concurrency=8) as plain:
        inputs = built_in((40,), 60, 200, plain.tokenizer, chat=False)
        with served(pair, wrong_token(every=10_000, first=7_000), concurrency=8) as candidate:
            result = accept(plain, candidate, inputs, Plan(concurrency=8, cache=False))
    assert result.verdict.tokens > 10_000
    assert result.verdict.mismatches == 1
    assert result.divergences[0].cause == "isolated"
