"""Synthetic checkpoints: the published sizes without the weights, and a tiny pair that really runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from k3dspark.checkpoint.header import read_header
from k3dspark.checkpoint.inventory import TensorSpec, expected_tensors
from k3dspark.checkpoint.published import published_config
from k3dspark.checkpoint.space import require_space
from k3dspark.checkpoint.synth import random_blocks, synthesise
from k3dspark.errors import BadInput, EngineFault
from k3dspark.model.loading import load_draft


def test_a_sparse_checkpoint_has_the_published_sizes_and_takes_no_space(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", sparse=True)
    model, head = (tmp_path / "x" / f"{name}.safetensors" for name in ("model", "lm_head"))
    assert (model.stat().st_size, head.stat().st_size) == (7_124_633_402, 2_348_810_336)
    assert model.stat().st_blocks * 512 + head.stat().st_blocks * 512 < 1 << 20
    assert read_header(model).header_bytes == 7_472
    with safe_open(model, framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: spec.shape for name, spec in expected_tensors(published_config()).items()}


def test_the_tiny_pair_loads_as_transformers_and_draft_and_shares_its_matrices(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", tiny=True)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "x/target")
    draft = load_draft(tmp_path / "x/draft")
    assert draft.lm_head is not None
    assert torch.equal(draft.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(draft.lm_head, target.lm_head.weight)
    assert target.config.num_hidden_layers == draft.config.target_num_hidden_layers
    assert target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3).shape == (1, 6)


def test_the_tiny_tokenizer_reads_any_text_and_places_its_special_tokens_as_the_config_says(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", tiny=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x/target")
    text = "héllo 世界\n\t~"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 319, 320)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthesise(tmp_path / name, tiny=True, seed=seed)
    files = [load_file(tmp_path / name / "draft/model.safetensors") for name in "abc"]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert not torch.equal(files[0]["context_proj.weight"], files[2]["context_proj.weight"])
    assert files[0]["final_norm.weight"].eq(1).all()
    assert 0.01 < float(files[0]["context_proj.weight"].std()) < 0.03


def test_bfloat16_numbers_are_rounded_to_nearest() -> None:
    (words,) = random_blocks(TensorSpec("w", "BF16", (4096,), ()), 0, 3)
    (wide,) = random_blocks(TensorSpec("w", "F32", (4096,), ()), 0, 3)
    expected = torch.from_numpy(np.ascontiguousarray(wide)).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16), expected)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesise(tmp_path / "x", tiny=True, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert 0 < seen[-1][1] - seen[-1][0] < 40_000  # headers are not counted


@pytest.mark.parametrize("tiny", [True, False])
def test_a_directory_with_files_in_it_is_left_alone(tmp_path: Path, tiny: bool) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(BadInput, match="not empty"):
        synthesise(tmp_path, tiny=tiny, sparse=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="not enough free space"):
        require_space(tmp_path / "a" / "b", 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_the_config_says_that_it_is_synthetic(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", sparse=True)
    assert "synth" in json.loads((tmp_path / "x/config.json").read_text())["_converted_from"]
    assert os.listdir(tmp_path / "x")
