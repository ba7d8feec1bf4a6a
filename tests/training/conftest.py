"""Shared by the training tests: one target, one directory of shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3dspark.target.weights import LlamaWeights
from k3dspark.training.shards import ShardStore
from small_training import load_llama, regenerator, write_deep_target


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep_target(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def weights(deep_target: Path) -> LlamaWeights:
    return load_llama(deep_target)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, weights: LlamaWeights) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    regenerator(weights).write_shards(directory, 300, "s0")
    return directory


@pytest.fixture
def store(shards: Path) -> ShardStore:
    return ShardStore(shards, eval_fraction=0.2)
