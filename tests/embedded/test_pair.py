"""A target and its draft opened together: the small random pair, and the packaged one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.compare import compare
from k3dspark.embedded.pair import EMBEDDED_DRAFT, ModelPair, load_embedded_pair, load_pair
from k3dspark.errors import BadInput
from k3dspark.model.packed import can_widen
from tiny_models import write_draft, write_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft"))


def test_the_target_is_opened_with_the_taps_its_draft_reads(target_dir: Path, draft_dir: Path) -> None:
    pair = load_pair(target_dir, draft_dir)
    assert pair.draft is not None
    assert list(pair.target.tap_layer_ids) == pair.draft.config.target_layer_ids == [0, 2]


def test_the_draft_uses_the_targets_embedding_without_a_copy(target_dir: Path, draft_dir: Path) -> None:
    pair = load_pair(target_dir, draft_dir, dtype="float32")
    assert pair.draft is not None
    embedding = pair.target.embed_weight  # type: ignore[attr-defined]
    assert pair.draft.embed_tokens.weight.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_models_compute_in_the_dtype_asked_for(target_dir: Path, draft_dir: Path, dtype: str) -> None:
    pair = load_pair(target_dir, draft_dir, dtype=dtype)  # type: ignore[arg-type]
    assert pair.draft is not None
    weights = pair.target.embed_weight  # type: ignore[attr-defined]
    assert weights.dtype == getattr(torch, dtype)
    assert pair.dtype == pair.draft.dtype == (torch.float32 if can_widen(weights) else weights.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_decoding_with_the_draft_gives_the_targets_tokens(target_dir: Path, draft_dir: Path, dtype: str) -> None:
    pair = load_pair(target_dir, draft_dir, dtype=dtype)  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=48)
    with_draft = Engine(pair.target, pair.draft).generate(pair.raw_ids("hello"), params)
    assert with_draft.token_ids == Engine(pair.target).generate(pair.raw_ids("hello"), params).token_ids


def test_without_a_draft_directory_there_is_no_draft(target_dir: Path) -> None:
    assert load_pair(target_dir, None).draft is None


def test_every_end_token_that_the_model_names_stops_an_answer(tmp_path: Path) -> None:
    write_target(tmp_path)
    assert load_pair(tmp_path, None).stop_ids == (257,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 257]}))
    assert load_pair(tmp_path, None).stop_ids == (5, 257)
    generation.write_text(json.dumps({"eos_token_id": None}))
    assert load_pair(tmp_path, None).stop_ids == (257,)
    generation.unlink()
    assert load_pair(tmp_path, None).stop_ids == (257,)


def test_a_garbled_generation_config_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(b"\xff{")
    with pytest.raises(BadInput, match=r"generation_config\.json"):
        load_pair(tmp_path, None)


@pytest.fixture(scope="module")
def embedded() -> ModelPair:
    return load_embedded_pair()


def test_the_packaged_pair_answers_and_its_draft_changes_nothing_but_the_number_of_passes(embedded: ModelPair) -> None:
    prompt = embedded.chat_ids("What is the capital of France?")
    params = SamplingParams(max_new_tokens=24, stop_token_ids=embedded.stop_ids)
    comparison = compare(Engine(embedded.target, embedded.draft), Engine(embedded.target), prompt, params)
    assert "Paris" in embedded.text(comparison.speculative.token_ids)
    assert comparison.identical
    assert comparison.speculative.stats.rounds < comparison.plain.stats.rounds


def test_the_packaged_draft_is_small_and_says_how_it_was_made() -> None:
    files = {path.name: path.stat().st_size for path in EMBEDDED_DRAFT.iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert "k3dspark train" in (EMBEDDED_DRAFT / "README.md").read_text(encoding="utf-8")
