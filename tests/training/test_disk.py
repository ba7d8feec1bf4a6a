"""Shards keep a size limit, and a disk that fills up leaves whole shards only."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from k3dspark.checkpoint import space
from k3dspark.cli.main import app
from k3dspark.errors import BadInput, EngineFault
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.disk import ShardRoom, remove_stale, write_shard
from k3dspark.training.pipeline import TrainJob, train
from k3dspark.training.regenerate import RegenerateSettings
from k3dspark.training.trainer import TrainSettings
from small_training import SHAPE, regenerator

SHARD = {"taps": torch.zeros(1000, 40), "ids": torch.arange(1000)}


def whole(directory: Path) -> list[str]:
    """Names of the shards that read back, and nothing else may be there but the lock."""
    names = sorted(path.name for path in directory.iterdir() if path.name != ".shards.lock")
    for name in names:
        assert load_file(directory / name)
    return names


@contextmanager
def full_after(limit_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: the write fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_in_the_middle_leaves_the_shards_before_it(tmp_path: Path) -> None:
    assert write_shard(SHARD, tmp_path / "a.safetensors", ShardRoom())
    with full_after(50_000), pytest.raises(EngineFault, match=r"b\.safetensors could not be written"):
        write_shard(SHARD, tmp_path / "b.safetensors", ShardRoom())
    assert whole(tmp_path) == ["a.safetensors"]
    assert write_shard(SHARD, tmp_path / "b.safetensors", ShardRoom())
    assert whole(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "MARGIN_BYTES", 1 << 60)  # more than any disk has
    with pytest.raises(EngineFault, match="not enough free space"):
        write_shard(SHARD, tmp_path / "a.safetensors", ShardRoom())
    assert whole(tmp_path) == []


def test_shards_together_stay_under_the_limit(tmp_path: Path) -> None:
    room = ShardRoom(500_000)  # a shard takes 168 kB
    written = [write_shard(SHARD, tmp_path / f"{i}.safetensors", room) for i in range(4)]
    assert written == [True, True, False, False]
    assert room.used_up(tmp_path)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= 500_000


def test_regeneration_ends_at_the_limit_and_makes_nothing_for_the_bin(weights: LlamaWeights, tmp_path: Path) -> None:
    first = regenerator(weights).write_shards(tmp_path / "free", 1, "s")
    size = next((tmp_path / "free").glob("*.safetensors")).stat().st_size
    room = ShardRoom(int(size * 1.2))
    source = regenerator(weights)
    made = source.write_shards(tmp_path / "limited", 100 * first, "s", room=room)
    assert made == first
    assert whole(tmp_path / "limited") == ["s-00000.safetensors"]
    state = source.rng.getstate()
    assert source.write_shards(tmp_path / "limited", 100 * first, "t", room=room) == 0
    assert source.rng.getstate() == state  # not even a prompt was drawn


def test_a_job_says_that_the_limit_was_reached_and_trains_on(deep_target: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    # Short answers, small shards; 12 prompts each
    job = TrainJob(
        deep_target, tmp_path / "out", tmp_path / "data", shape=SHAPE, answer_tokens=100_000,
        data_limit_bytes=2_500_000,
        regenerate=RegenerateSettings(group=12, max_answer_tokens=24, max_prompt_tokens=12),
        settings=TrainSettings(steps=1, sequences=2, anchors=4, evaluate_every=1000),
    )  # fmt: skip
    record = train(job, lambda stage, metrics: heard.append((stage, metrics)))
    assert record["steps"] == 1
    (limited,) = [metrics for stage, metrics in heard if stage == "data limit"]
    assert limited == {"answer_tokens": record["answer_tokens"], "wanted_tokens": 100_000, "limit": "0.0025 GB"}
    assert 0 < sum(p.stat().st_size for p in (tmp_path / "data").glob("*.safetensors")) <= 2_500_000
    with pytest.raises(BadInput, match="holds no shard"):
        train(replace(job, data=tmp_path / "none", data_limit_bytes=1000), lambda *_: None)


def test_the_command_takes_the_limit_in_gigabytes(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    """The shards that are there already use the limit up: not one more is made."""
    before = sorted(shards.iterdir())
    done = CliRunner().invoke(
        app,
        ["train", "--target", str(deep_target), "--out", str(tmp_path), "--data", str(shards), "--data-limit", "1e-5",
         "--steps", "1", "--sequences", "2", "--anchors", "2", "--layers", "1", "--draft-vocab", "260", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "1e-05 GB are used up" in done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert [p for p in sorted(shards.iterdir()) if p.suffix == ".safetensors"] == [
        p for p in before if p.suffix == ".safetensors"
    ]


def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    remove_stale(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["b.2.tmp"]
