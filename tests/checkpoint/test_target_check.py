"""A draft against its target: each mismatch has one name, and the rest stays silent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from k3dspark.checkpoint.inspection import inspect_checkpoint
from k3dspark.checkpoint.rows import as_floats, equal_in
from k3dspark.checkpoint.synth import synthesise
from k3dspark.errors import BadInput

Change = Callable[[Path], None]
ROTATION = np.linalg.qr(np.random.default_rng(5).standard_normal((32, 32)))[0].astype(np.float32)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "pair"
    synthesise(directory, tiny=True)
    return directory


@pytest.fixture
def pair(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "pair"))


def json_file(name: str, edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(target: Path) -> None:
        mapping = json.loads((target / name).read_text())
        edit(mapping)
        (target / name).write_text(json.dumps(mapping))

    return change


def config(**values: Any) -> Change:
    return json_file("config.json", lambda mapping: mapping.update(values))


def matrix(name: str, edit: Callable[[Any], Any]) -> Change:
    def change(target: Path) -> None:
        tensors = load_file(target / "model.safetensors")
        save_file(tensors | {name: edit(tensors[name])}, target / "model.safetensors")

    return change


def found(pair: Path) -> list[tuple[str, str]]:
    return [(f.id, f.subject) for f in inspect_checkpoint(pair / "draft", pair / "target").findings]


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def swap_tokens(mapping: dict[str, Any]) -> None:
    mapping["bos_token"] = "[UNK]"


def move_stop(target: Path) -> None:
    json_file("generation_config.json", lambda m: m.update(eos_token_id=[300]))(target)
    config(eos_token_id=300)(target)
    json_file("tokenizer_config.json", lambda m: m.update(eos_token="<|reserved_300|>"))(target)


@pytest.mark.parametrize(
    ("change", "identifier", "subject"),
    [
        (config(hidden_size=64), "target.hidden_size", "target_hidden_size"),
        (config(vocab_size=321), "target.vocab_size", "vocab_size"),
        (config(num_hidden_layers=9), "target.num_hidden_layers", "target_num_hidden_layers"),
        (json_file("tokenizer_config.json", swap_tokens), "target.special_ids", "bos_token_id"),
        (move_stop, "target.special_ids", "eos_token_id"),
        (
            json_file("generation_config.json", lambda m: m.update(eos_token_id=317)),
            "target.special_ids",
            "eos_token_id",
        ),
        (matrix(EMBED, lambda rows: rows @ ROTATION), "target.rotated", "embed_tokens"),
        (matrix(HEAD, lambda rows: rows @ ROTATION), "target.rotated", "lm_head"),
        (matrix(EMBED, lambda rows: rows * np.float32(1.5)), "target.embed_tokens", "embed_tokens"),
        (matrix(EMBED, lambda rows: np.roll(rows, 1, 0) * 3), "target.embed_tokens", "embed_tokens"),
    ],
    ids=[
        "width",
        "vocabulary",
        "layers",
        "bos",
        "stop tokens",
        "mask is a stop",
        "rotated",
        "head",
        "scaled",
        "shuffled",
    ],
)
def test_one_disagreement_gives_one_finding(pair: Path, change: Change, identifier: str, subject: str) -> None:
    change(pair / "target")
    assert found(pair) == [(identifier, subject)]


def test_a_rotation_of_both_matrices_is_one_finding(pair: Path) -> None:
    matrix(EMBED, lambda rows: rows @ ROTATION)(pair / "target")
    matrix(HEAD, lambda rows: rows @ ROTATION)(pair / "target")
    assert found(pair) == [("target.rotated", "embed_tokens")]


def test_a_matching_target_gives_no_finding(pair: Path) -> None:
    assert found(pair) == []


def test_yarn_that_differs_from_the_targets_is_a_warning(pair: Path) -> None:
    block = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 50000.0}
    config(rope_parameters=block)(pair / "target")
    inspection = inspect_checkpoint(pair / "draft", pair / "target")
    assert [(f.id, f.subject) for f in inspection.findings] == [("target.rope", "rope_parameters.factor")]
    assert inspection.complete


def test_a_text_model_inside_a_larger_one_is_found(pair: Path) -> None:
    def nest(mapping: dict[str, Any]) -> None:
        inner = dict(mapping)
        mapping.clear()
        mapping.update(model_type="kimi_k3", text_config=inner)

    json_file("config.json", nest)(pair / "target")
    tensors = load_file(pair / "target/model.safetensors")
    save_file({f"language_model.{name}": value for name, value in tensors.items()}, pair / "target/model.safetensors")
    assert found(pair) == []
    config(text_config={"hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 8})(pair / "target")
    assert found(pair) == [("target.hidden_size", "target_hidden_size")]


def test_shards_are_found_through_an_index_too_large_to_parse(pair: Path) -> None:
    target = pair / "target"
    tensors = load_file(target / "model.safetensors")
    tensors[EMBED] = tensors[EMBED] @ ROTATION
    save_file(tensors, target / "model-00001-of-00001.safetensors")
    (target / "model.safetensors").unlink()
    filler = {f"model.layers.{i}.experts.{j}.weight": "other.safetensors" for i in range(200) for j in range(500)}
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": filler | dict.fromkeys(tensors, "model-00001-of-00001.safetensors")})
    )
    assert (target / "model.safetensors.index.json").stat().st_size > 4 << 20
    assert found(pair) == [("target.rotated", "embed_tokens")]


def test_a_target_in_another_dtype_is_compared_after_rounding(pair: Path) -> None:
    matrix(EMBED, lambda rows: rows.astype(np.float16))(pair / "target")
    assert found(pair) == []


def test_a_quantised_embedding_is_not_judged(pair: Path) -> None:
    matrix(EMBED, lambda rows: (rows * 1000).astype(np.int8))(pair / "target")
    assert found(pair) == []


def test_special_tokens_are_read_from_tokenizer_json_where_the_config_lists_none(pair: Path) -> None:
    def edit(mapping: dict[str, Any]) -> None:
        del mapping["added_tokens_decoder"]
        mapping["pad_token"] = {"content": "[UNK]"}

    json_file("tokenizer_config.json", edit)(pair / "target")
    assert found(pair) == [("target.special_ids", "pad_token_id")]


def test_a_target_that_is_none_is_an_error(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        inspect_checkpoint(pair / "draft", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput):
        inspect_checkpoint(pair / "draft", tmp_path / "empty")


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"hidden_size": "x", "vocab_size": None},
        {"text_config": 3},
        {"rope_parameters": [], "eos_token_id": {"a": 1}},
    ],
)
def test_odd_target_configs_are_survived(pair: Path, mapping: dict[str, Any]) -> None:
    (pair / "target/config.json").write_text(json.dumps(mapping))
    found(pair)


@given(st.lists(st.floats(width=32), min_size=1, max_size=16))
def test_rows_are_decoded_and_rounded_as_numpy_does(values: list[float]) -> None:
    row = np.array(values, np.float32)
    assert np.array_equal(np.array(as_floats(row.tobytes(), "F32"), np.float32), row, equal_nan=True)
    with np.errstate(over="ignore"):
        half = row.astype(np.float16)
    assert np.array_equal(np.array(as_floats(half.tobytes(), "F16"), np.float16), half, equal_nan=True)
    if np.isfinite(half).all():
        assert equal_in([float(v) for v in row], [float(v) for v in half], "F16")
