"""One tiny pair and one server for all tests that change neither."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Running, running, tiny_pair

from k3dspark.embedded.pair import ModelPair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def server(pair: ModelPair) -> Iterator[Running]:
    with running(pair) as started:
        yield started
