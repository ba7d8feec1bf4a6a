"""Faults planted in a real server: each must be called by its name, and a healthy draft must be accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.planted import dropped_at_stop_string, served, temperature, wrong_token
from k3dspark.acceptance.asking import Source
from k3dspark.acceptance.classify import Kind
from k3dspark.acceptance.inputs import InputSet, built_in
from k3dspark.acceptance.run import Acceptance, Plan, accept
from k3dspark.acceptance.server import Server
from k3dspark.acceptance.verdict import Outcome
from k3dspark.embedded.pair import ModelPair, load_pair
from tiny_models import CHAT_TEMPLATE, write_pair, write_target

TOKENS = 20
PLAN = Plan(concurrency=2, cache=False)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_pair(root)


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> ModelPair:
    return load_pair(*directories, dtype="float32")


@pytest.fixture(scope="module")
def plain(directories: tuple[Path, Path]) -> Iterator[Server]:
    with served(load_pair(directories[0], None, dtype="float32")) as server:
        yield server


@pytest.fixture(scope="module")
def inputs(plain: Server) -> InputSet:
    return built_in((40,), 2, TOKENS, plain.tokenizer, chat=True)


def kinds(result: Acceptance) -> set[Kind]:
    return {divergence.kind for divergence in result.divergences}


def test_a_server_with_its_draft_is_identical_to_one_without_cold_and_warm(
    plain: Server, pair: ModelPair, inputs: InputSet
) -> None:
    with served(pair) as candidate:
        result = accept(plain, candidate, inputs, Plan(concurrency=2))
    assert result.verdict.outcome is Outcome.IDENTICAL
    assert result.numerics is not None
    assert result.numerics.largest == 0.0  # the same bits, not only the same tokens
    assert result.sources == (Source.IDS, Source.IDS)
    assert {tally.run for tally in result.tallies} == {"cold", "warm", "stop"}
    assert all(cached is not None and cached > 0 for cached in result.cached)  # warm runs did meet the cache


def test_a_temperature_that_slipped_in(plain: Server, pair: ModelPair, inputs: InputSet) -> None:
    with served(pair, temperature(0.8)) as candidate:
        result = accept(plain, candidate, inputs, PLAN)
    assert result.verdict.outcome is Outcome.DIFFERENT
    assert "candidate_sampled" in result.verdict.findings
    assert {d.cause for d in result.divergences if d.kind is Kind.MISMATCH} == {"sampled"}


def test_a_wrong_template(plain: Server, tmp_path: Path, inputs: InputSet) -> None:
    other = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant ")  # of the same length
    pair = load_pair(write_target(tmp_path / "target", chat_template=other), None, dtype="float32")
    with served(pair) as candidate:
        result = accept(plain, candidate, inputs, PLAN)
    assert kinds(result) == {Kind.PROMPT}
    assert {d.group for d in result.divergences} <= {"chat", "stop"}
    assert "template" in result.verdict.findings


def test_one_wrong_token_in_ten_thousand(plain: Server, pair: ModelPair, inputs: InputSet) -> None:
    with served(pair, wrong_token(every=10_000, first=30)) as candidate:
        result = accept(plain, candidate, inputs, PLAN)
    (divergence,) = [d for d in result.divergences if d.run == "cold"]
    assert divergence.kind is Kind.MISMATCH
    assert divergence.cause == "isolated"
    assert divergence.facts["candidate_own_best"] == divergence.baseline
    assert result.verdict.mismatches == 1


def test_a_token_dropped_at_a_stop_string(plain: Server, pair: ModelPair, inputs: InputSet) -> None:
    with served(pair, dropped_at_stop_string()) as candidate:
        result = accept(plain, candidate, inputs, PLAN)
    assert kinds(result) == {Kind.STOP}
    assert {d.run for d in result.divergences} == {"stop"}
    assert result.verdict.outcome is Outcome.DIFFERENT


def test_another_dtype(plain: Server, directories: tuple[Path, Path], inputs: InputSet) -> None:
    with served(load_pair(*directories, dtype="bfloat16")) as candidate:
        result = accept(plain, candidate, inputs, PLAN)
    assert kinds(result) <= {Kind.TIE}
    assert "numerics" in result.verdict.findings
    assert result.numerics is not None
    assert result.numerics.reading == "rounding of a 16-bit format"
    assert result.verdict.accepted
