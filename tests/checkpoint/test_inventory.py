"""Expected tensors, header arithmetic and file sizes, against the numbers of the published files (spec §J)."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from k3dspark.checkpoint.inventory import (
    canonical_name,
    expected_tensors,
    file_bytes,
    header_json,
    lm_head_tensor,
)
from k3dspark.checkpoint.published import published_config, tiny_config


def test_the_published_config_asks_for_68_tensors_of_3562312961_parameters() -> None:
    tensors = expected_tensors(published_config())
    assert len(tensors) == 68
    assert sum(spec.parameters for spec in tensors.values()) == 3_562_312_961
    assert {spec.dtype for spec in tensors.values()} == {"BF16"}


def test_the_published_files_have_these_sizes_to_the_byte() -> None:
    config = published_config()
    specs = expected_tensors(config).values()
    assert len(header_json(specs)) == 7_472
    assert file_bytes(specs) == 7_124_633_402
    assert file_bytes([lm_head_tensor(config)]) == 2_348_810_336 == 163840 * 7168 * 2 + 96


@pytest.mark.parametrize(
    ("metadata", "header"), [({}, 7488), ({"format": "pt"}, 7504), ({"torchspec_version": "0.1.0"}, 7520)]
)
def test_header_sizes_with_metadata_match_the_specification(metadata: dict[str, str], header: int) -> None:
    assert len(header_json(expected_tensors(published_config()).values(), metadata)) == header


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("context_proj.weight", (7168, 35840)),
        ("layers.4.self_attn.q_b_proj.weight", (12288, 1536)),
        ("layers.0.self_attn.kv_b_proj.weight", (16384, 512)),
        ("layers.2.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("confidence_head.proj.weight", (1, 7424)),
        ("markov_head.markov_w2.weight", (163840, 256)),
    ],
)
def test_shapes_follow_from_the_config(name: str, shape: tuple[int, ...]) -> None:
    assert expected_tensors(published_config())[name].shape == shape


def test_a_norm_for_each_tap_adds_five_tensors() -> None:
    tensors = expected_tensors({**published_config(), "fc_norm": True})
    assert len(tensors) == 73
    assert sum(spec.parameters for spec in tensors.values()) == 3_562_348_801


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("gated", {"gate_proj.weight": (8, 40), "gate_proj.bias": (8,)}),
        ("rnn", {"joint_proj.weight": (24, 48), "joint_proj.bias": (24,)}),
    ],
)
def test_other_markov_heads_add_their_own_tensors(kind: str, shapes: dict[str, tuple[int, ...]]) -> None:
    plain = expected_tensors(tiny_config())
    tensors = expected_tensors({**tiny_config(), "markov_head_type": kind})
    added = {name.removeprefix("markov_head."): tensors[name].shape for name in tensors.keys() - plain.keys()}
    assert added == shapes


def test_a_draft_vocabulary_narrows_the_markov_head_and_adds_its_token_ids() -> None:
    tensors = expected_tensors({**tiny_config(), "draft_vocab_size": 100})
    assert tensors["d2t"].shape == (100,)
    assert tensors["d2t"].dtype == "I64"
    assert tensors["markov_head.markov_w2.weight"].shape == (100, 8)
    assert next(iter(tensors)) == "d2t"  # safetensors puts the widest dtype first


def test_switches_remove_tensors() -> None:
    full = expected_tensors(tiny_config())
    without = expected_tensors({**tiny_config(), "share_target_embeddings": True, "enable_confidence_head": False})
    gone = full.keys() - without.keys()
    assert gone == {"embed_tokens.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    plain_head = expected_tensors({**tiny_config(), "confidence_head_with_markov": False})
    assert plain_head["confidence_head.proj.weight"].shape == (1, 32)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("fc.weight", "context_proj.weight"),
        ("hidden_norm.weight", "context_norm.weight"),
        ("norm.weight", "final_norm.weight"),
        ("model.norm.weight", "final_norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("draft_model.markov_head.markov_w1.weight", "markov_head.markov_w1.weight"),
        ("draft_model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("context_proj.weight", "context_proj.weight"),
    ],
)
def test_both_name_families_and_prefixes_lead_to_one_name(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


def test_the_safetensors_library_orders_and_sizes_a_file_the_same_way(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    specs = expected_tensors({**tiny_config(), "draft_vocab_size": 100})
    kinds = {"I64": numpy.int64, "F32": numpy.float32}
    save_file({n: numpy.zeros(s.shape, kinds[s.dtype]) for n, s in reversed(specs.items())}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    assert len(data) == file_bytes(specs.values())
    assert data[8 : 8 + int.from_bytes(data[:8], "little")] == header_json(specs.values())
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert set(file.keys()) == set(specs)
