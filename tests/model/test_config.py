"""`K3DSparkConfig`: faithful to the file it came from, strict about what it holds."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoConfig

from k3dspark.checkpoint.fields import FIELDS
from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig, register

ODD = {
    "_torchspec_version": "0.1.0",
    "_converted_from": "/checkpoints/iter_80001",
    "unknown": {"nested": [1, None, "x"]},
    "temperature": 0.3,
    "use_cache": True,
    "id2label": {"0": "x"},
    "softmax_scale": 3,
    "to_dict": 4,
    "_snapshot": 5,
    "_commit_hash": "abc",
    "transformers_version": "4.51.0",
    "quantization_config": None,
}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("read", [K3DSparkConfig.from_file, AutoConfig.from_pretrained], ids=["class", "AutoConfig"])
@pytest.mark.parametrize("extra", [{}, ODD], ids=["published", "with odd keys"])
def test_a_config_file_survives_reading_and_saving_unchanged(tmp_path: Path, read: Any, extra: dict[str, Any]) -> None:
    original = {**published_config(), **extra}
    config = read(write(tmp_path, original))
    assert isinstance(config, K3DSparkConfig)
    config.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == original


def test_copies_and_pickles_are_equal_and_independent() -> None:
    config = K3DSparkConfig(**(published_config() | ODD))
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        twin.target_layer_ids.append(91)
        assert config.target_layer_ids == [2, 23, 47, 71, 89]


def test_every_field_of_the_file_is_an_attribute_under_its_own_name() -> None:
    config = K3DSparkConfig.published()
    for name, value in published_config().items():
        found = getattr(config, name)
        assert found == (torch.bfloat16 if name == "torch_dtype" else value), name


def test_switches_default_to_the_published_drafts_behaviour() -> None:
    config = K3DSparkConfig.published()
    assert (config.block_size, config.block_causal, config.fc_norm) == (7, False, False)
    assert (config.aux_hidden_stream, config.sample_from_anchor, config.hidden_act) == ("prefix", True, "silu")


def test_derived_figures_of_the_published_draft() -> None:
    config = K3DSparkConfig.published()
    assert config.softmax_scale == pytest.approx(0.1308608, abs=1e-7)
    assert config.rope_multiplier == 1.0
    assert (config.qk_head_dim, config.context_width, config.row_width) == (192, 35840, 576)


def test_a_changed_attribute_is_saved_and_nothing_else_moves(tmp_path: Path) -> None:
    config = K3DSparkConfig.from_file(write(tmp_path, published_config()))
    config.block_size = 5
    config.rope_parameters["factor"] = 16.0
    config.dtype = torch.float32
    expected = published_config() | {"block_size": 5, "torch_dtype": "float32"}
    expected["rope_parameters"]["factor"] = 16.0
    assert config.mapping() == expected
    assert config.to_dict() == expected


def test_keyword_overrides_of_autoconfig_reach_the_saved_file(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write(tmp_path, published_config()), block_size=5)
    assert config.mapping()["block_size"] == 5


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({}, False),
        ({"block_causal": True}, True),
        ({"dflash_config": {"causal": True}}, True),
        ({"full_attention_causal": True}, True),
        ({"dflash_config": {"causal": False}, "full_attention_causal": True}, False),
        ({"block_causal": False, "dflash_config": {"causal": True}}, False),
    ],
)
def test_block_causality_is_read_from_the_key_that_comes_first(keys: dict[str, Any], causal: bool) -> None:
    assert K3DSparkConfig(**published_config(), **keys).block_causal is causal


def test_older_rope_keys_mean_the_same(tmp_path: Path) -> None:
    original = published_config()
    block = original.pop("rope_parameters")
    block["type"] = block.pop("rope_type")
    del block["rope_theta"]
    original["rope_scaling"] = block
    config = K3DSparkConfig.from_file(write(tmp_path, original))
    assert config.rope_parameters == published_config()["rope_parameters"]
    assert config.rope_theta == 50000.0
    assert config.mapping() == original


def test_optional_counts_follow_from_what_is_stated() -> None:
    stated = published_config()
    for name in ("num_key_value_heads", "num_target_layers", "draft_vocab_size", "architectures", "torch_dtype"):
        del stated[name]
    config = K3DSparkConfig(**stated)
    assert (config.num_key_value_heads, config.num_target_layers, config.draft_vocab_size) == (64, 5, 163840)
    assert config.mapping() == {**stated}


def test_null_stands_for_the_default_and_stays_null_in_the_file() -> None:
    stated = {**published_config(), "block_size": None, "hidden_act": None, "tie_word_embeddings": None}
    config = K3DSparkConfig(**stated)
    assert (config.block_size, config.hidden_act, config.tie_word_embeddings) == (7, "silu", False)
    assert config.mapping() == stated


def test_torch_dtypes_are_accepted_where_files_have_strings() -> None:
    config = K3DSparkConfig(**{**tiny_config(), "torch_dtype": torch.float16})
    assert config.dtype is torch.float16
    assert config.mapping()["torch_dtype"] == "float16"


def test_registering_twice_is_harmless() -> None:
    register()
    assert isinstance(AutoConfig.for_model(**published_config()), K3DSparkConfig)


@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.required])
def test_a_missing_required_field_is_named(name: str) -> None:
    config = published_config()
    config.pop(name)
    if name == "model_type":  # the class itself supplies it
        K3DSparkConfig(**config)
        return
    with pytest.raises(BadInput, match=rf"{name}: it is missing"):
        K3DSparkConfig(**config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "7168"),
        ("hidden_size", -1),
        ("num_hidden_layers", 10**30),
        ("rms_norm_eps", float("nan")),
        ("target_layer_ids", [2, 23, 47, 71, 93]),
        ("mla_use_nope", True),
        ("vocab_size", None),
        ("torch_dtype", "int4"),
        ("architectures", "K3DSparkModel"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        K3DSparkConfig(**{**published_config(), name: value})
    assert f"{name}: " in caught.value.what


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"a": 1, "a": 2}', "stands there twice"),
        ("[" * 100_000, "nested too deeply|far more"),
        ('{"hidden_size": ' + "9" * 9999 + "}", "thousands of digits"),
        ("{}", "model_type: it is missing"),
        ('{"model_type": "llama"}', 'model_type: it is the string "llama"'),
        ("\udcff", "not UTF-8"),
    ],
    ids=["empty", "list", "doubled", "nested", "digits", "no keys", "another model", "not utf-8"],
)
def test_an_unreadable_config_file_says_why(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=reason) as caught:
        K3DSparkConfig.from_file(tmp_path)
    assert str(tmp_path) in caught.value.what


def test_a_directory_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        K3DSparkConfig.from_file(tmp_path)


KEYS = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_"), min_size=1, max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@example({"name_or_path": None})
@example({"name_or_path": "a/b"})
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_unknown_keys_survive_whatever_they_are(extra: dict[str, Any]) -> None:
    mapping = {**extra, **tiny_config()}
    mapping = {
        key: value for key, value in mapping.items() if key in tiny_config() or key not in {f.name for f in FIELDS}
    }
    assert K3DSparkConfig(**mapping).mapping() == mapping
