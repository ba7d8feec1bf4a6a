"""`k3dspark accept` between servers of vLLM on CPU: ngram and our draft are proved, another model is found out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vllm_environment import interpreter, needs_vllm, write_pair
from vllm_servers import vllm_server

pytestmark = [pytest.mark.integration, needs_vllm]

PROGRAM = [sys.executable, "-c", "from k3dspark.cli.main import main; main()"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft."""
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM without speculative decoding."""
    with vllm_server(models[0], tmp_path_factory.mktemp("plain") / "log") as address:
        yield address


def accept(baseline: str, candidate: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report: prompts of two lengths, chats and stop strings, each cold and warm."""
    command = [
        *PROGRAM, "accept", "--baseline", baseline, "--candidate", candidate, "--json",
        "--lengths", "64,300", "--per-length", "2", "-n", "16", "--concurrency", "2", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def check_identical(status: int, told: dict[str, Any]) -> None:
    assert (status, told["verdict"]["outcome"]) == (0, "identical"), told["verdict"]
    assert {tally["run"] for tally in told["tallies"]} >= {"cold", "warm"}
    assert all(tally["answers"] == tally["identical"] > 0 for tally in told["tallies"])
    assert told["candidate"]["cached_prompt_tokens"] > 0


def test_ngram_is_proved(models: tuple[Path, Path], plain: str, tmp_path: Path) -> None:
    with vllm_server(models[0], tmp_path / "log", "--speculative-config", json.dumps(NGRAM)) as candidate:
        check_identical(*accept(plain, candidate))


def test_our_draft_is_proved(models: tuple[Path, Path], plain: str, tmp_path: Path) -> None:
    draft = {"method": "dspark", "model": str(models[1]), "num_speculative_tokens": 7}
    options = ("--speculative-config", json.dumps(draft))
    with vllm_server(models[0], tmp_path / "log", *options, more=interpreter()) as candidate:
        check_identical(*accept(plain, candidate))


def test_a_model_with_one_other_matrix_is_found_out(models: tuple[Path, Path], plain: str, tmp_path: Path) -> None:
    target = shutil.copytree(models[0], tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with vllm_server(target, tmp_path / "log", "--speculative-config", json.dumps(NGRAM)) as candidate:
        status, told = accept(plain, candidate)
    assert (status, told["verdict"]["outcome"]) == (1, "different")
    assert told["verdict"]["mismatches"] > 0
