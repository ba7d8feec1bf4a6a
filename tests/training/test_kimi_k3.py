"""A draft for a Kimi K3: answers, training and export in either stream, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.embedded.pair import load_pair
from k3dspark.errors import BadInput
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.protocol import RaggedRows
from k3dspark.training.evaluate import replay_greedy
from k3dspark.training.pipeline import TrainJob, train
from k3dspark.training.regenerate import RegenerateSettings
from k3dspark.training.shards import ShardStore
from k3dspark.training.trainer import TrainSettings
from small_training import SHAPE
from target.small_k3 import random_tensors, small_shape, write_small_k3
from tiny_models import VOCABULARY

STREAMS: tuple[Literal["prefix", "attn_res"], ...] = ("prefix", "attn_res")
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": 257}


def quiet(_: str, __: dict[str, Any]) -> None:
    pass


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven layers; five taps below the last: 0 … 4 or 1 … 5."""
    return write_small_k3(tmp_path_factory.mktemp("k3") / "target", random_tensors(small_shape(**SIZES)), **SIZES)


def job(k3: Path, place: Path, stream: Literal["prefix", "attn_res"] = "prefix") -> TrainJob:
    prompts = place / "prompts.txt"
    prompts.write_text("".join(f"please answer question {number}\n" for number in range(12)))
    settings = TrainSettings(steps=6, sequences=2, anchors=4, evaluate_every=1000, checkpoint_every=1000)
    return TrainJob(
        k3, place / "draft", place / "data", prompts, stream=stream, answer_tokens=100, shape=SHAPE, settings=settings,
        regenerate=RegenerateSettings(group=12, answers=1, max_answer_tokens=16),
    )  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS)
def test_a_draft_trained_on_a_kimi_k3_reads_its_stream_and_changes_no_token(
    k3: Path, tmp_path: Path, stream: Literal["prefix", "attn_res"]
) -> None:
    work = job(k3, tmp_path, stream)
    record = train(work, quiet)
    assert record["steps"] == 6
    pair = load_pair(k3, work.out, dtype="float32")
    assert isinstance(pair.target, KimiK3Target)
    assert pair.draft is not None
    assert pair.target.stream == stream == pair.draft.config.aux_hidden_stream

    # What was recorded is what this target hands to a draft.
    store = ShardStore(work.data)
    sequence = store.train[0]
    ids = store.rows("ids", sequence).long()
    handle = pair.target.open()
    taps = pair.target.forward(RaggedRows((handle,), (len(ids) - 1,), ids[:-1])).taps
    torch.testing.assert_close(store.rows("taps", sequence)[:-1].float(), taps, atol=2e-2, rtol=2e-2)
    pair.target.commit(handle, 0)

    prompts = [pair.raw_ids(text) for text in ("rain", "a longer text", "x")]
    answers = [
        [list(Engine(pair.target, draft).generate(ids, SamplingParams(12)).token_ids) for ids in prompts]
        for draft in (None, pair.draft)
    ]
    assert answers[0] == answers[1]
    assert replay_greedy(pair.draft, store, [s for s in store.train if s.greedy]).rounds > 0


def test_shards_of_one_stream_train_no_draft_of_the_other(k3: Path, tmp_path: Path) -> None:
    work = job(k3, tmp_path, "attn_res")
    train(replace(work, settings=replace(work.settings, steps=1)), quiet)
    with pytest.raises(BadInput, match="holds taps of the stream attn_res"):
        train(replace(work, stream="prefix", out=tmp_path / "other"), quiet)
    assert json.loads((work.out / "config.json").read_text())["aux_hidden_stream"] == "attn_res"


def test_a_llama_has_no_other_stream(deep_target: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no stream attn_res"):
        train(TrainJob(deep_target, tmp_path / "draft", tmp_path / "data", stream="attn_res"), quiet)
    assert list(tmp_path.iterdir()) == []
