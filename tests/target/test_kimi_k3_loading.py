"""Directories of Kimi K3: recognised by config, checked by index, refused with the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape, is_kimi_k3, kimi_k3_tensors, packed_names
from k3dspark.checkpoint.mini_kimi_k3 import mini_kimi_k3_config, mini_kimi_k3_shards, published_kimi_k3_config
from k3dspark.errors import BadInput
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_loading import unpack_fp4
from k3dspark.target.loading import open_target
from target.small_k3 import ids, random_tensors, small_config, small_shape, small_target
from target.tiny import llama, make_model, run, save

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None, shards: int = 2) -> Path:
    """A model directory of so many shards; the vision tower of the published model is there, too."""
    weight_map = {"vision_tower.patch_embed.proj.weight": "model-1.safetensors"}
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    parts[0]["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
    for number, (name, tensor) in enumerate(tensors.items()):
        parts[number % shards][name] = tensor.contiguous()
        weight_map[name] = f"model-{number % shards + 1}.safetensors"
    for number, part in enumerate(parts):
        save_file(part, directory / f"model-{number + 1}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config or small_config()))
    return directory


def test_the_published_config_asks_for_the_published_tensors() -> None:
    shape = KimiK3Shape.from_config(published_kimi_k3_config())
    tensors = kimi_k3_tensors(shape)
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 92 * 896 * 3
    assert len(tensors) - len(experts) == 2_460
    assert sum(math.prod(size) for size in tensors.values()) == pytest.approx(2.78e12, rel=0.01)
    assert len(shape.kda_layers) == 69
    assert shape.mla_layers == (*range(3, 92, 4), 92)
    assert tensors["language_model.model.layers.0.mlp.down_proj.weight"] == (7168, 33792)
    assert tensors["language_model.model.layers.92.self_attn.g_proj.weight"] == (96 * 128, 7168)


def test_the_miniature_has_every_layer_in_its_place() -> None:
    published, mini = (
        KimiK3Shape.from_config(config) for config in (published_kimi_k3_config(), mini_kimi_k3_config())
    )
    assert (mini.layers, mini.kda_layers, mini.block_size) == (93, published.kda_layers, 12)
    stored = {spec.name for specs in mini_kimi_k3_shards().values() for spec in specs}
    assert stored == set(kimi_k3_tensors(mini))


def test_a_directory_opens_with_its_taps_and_stream(tmp_path: Path) -> None:
    tensors = random_tensors(small_shape())
    target = open_target(write(tmp_path, tensors), "float32", (0, 2, 5), tap_stream="attn_res")
    assert isinstance(target, KimiK3Target)
    expected = small_target(stream="attn_res", tensors=tensors)
    one, two = (run(t, t.open(), ids(12)) for t in (target, expected))
    torch.testing.assert_close(one.taps, two.taps.float(), rtol=1e-4, atol=1e-4)
    assert (target.vocab_size, target.hidden_size, target.max_positions) == (61, 32, 256)


def test_experts_quantised_as_published_run_as_the_matrices_they_stand_for(tmp_path: Path) -> None:
    plain = random_tensors(small_shape())
    stored = dict(plain)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if ".experts." in name:
            rows, columns = tensor.shape
            packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
            del stored[name]
            stored |= dict(zip(packed_names(name), (packed, scales), strict=True))
            plain[name] = unpack_fp4(packed, scales)
    target, expected = open_target(write(tmp_path, stored), "float32", (5,)), small_target((5,), tensors=plain)
    one, two = (run(t, t.open(), ids(12)) for t in (target, expected))
    torch.testing.assert_close(one.taps, two.taps.float(), rtol=1e-4, atol=1e-4)


def test_too_large_a_model_is_refused_by_its_index_alone_with_what_it_needs(tmp_path: Path) -> None:
    config = published_kimi_k3_config()
    config["text_config"]["num_experts"] = 40  # at full size the index takes seconds; this still needs 330 GiB
    names = kimi_k3_tensors(KimiK3Shape.from_config(config))
    files = {part: "model-00001-of-000096.safetensors" for name in names for part in stored_names(name)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(BadInput, match=r"does not fit .*GiB.*as published.*--mini-k3"):
        open_target(tmp_path, "bfloat16")
    del files[packed_names(EXPERT)[1]]
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(BadInput, match=rf"1 tensors are missing .*{EXPERT}"):
        open_target(tmp_path, "bfloat16")


def stored_names(name: str) -> tuple[str, ...]:
    return packed_names(name) if ".experts." in name else (name,)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d, t: t.pop(EXPERT), "1 tensors are missing"),
        (lambda d, t: t.update({EXPERT: torch.zeros(3, 3)}), r"has shape \[3, 3\]"),
        (lambda d, t: t.update({EXPERT: torch.zeros(32, 32, dtype=torch.int8)}), "holds torch.int8"),
    ],
    ids=["missing", "misshapen", "foreign"],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, spoil: Any, said: str) -> None:
    tensors = random_tensors(small_shape())
    spoil(tmp_path, tensors)
    with pytest.raises(BadInput, match=said):
        open_target(write(tmp_path, tensors), "float32")


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(small_shape()))
    shard = tmp_path / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"cannot be read .*model-2"):
        open_target(tmp_path, "float32")
    shard.unlink()
    with pytest.raises(BadInput, match=r"1 of 2 weight files .*model-2"):
        open_target(tmp_path, "float32")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../x.safetensors"}}')
    with pytest.raises(BadInput, match="beside the index"):
        open_target(tmp_path, "float32")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadInput, match="is not a weight index"):
        open_target(tmp_path, "float32")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(BadInput, match="has no weights"):
        open_target(tmp_path, "float32")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "silu"}, "hidden_act silu"),
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"num_experts": 1}, "num_experts_per_token 2"),
        ({"num_expert_group": 4}, "num_expert_group 4"),
        ({"hidden_size": "x"}, "hidden_size x"),
        ({"rms_norm_eps": None}, "rms_norm_eps None"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5]}}, "must name each of the layers 1 to 7 once"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5, "6"]}}, "must name each of the layers 1 to 7 once"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_architecture_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        small_shape(**changes)


def test_kimi_linear_without_attention_residuals_is_not_kimi_k3() -> None:
    config = small_config()
    assert is_kimi_k3(config)
    assert is_kimi_k3(config["text_config"])
    assert not is_kimi_k3({**config["text_config"], "attn_res_block_size": None})
    assert not is_kimi_k3({"model_type": "llama"})


def test_a_stream_of_kimi_k3_is_refused_on_another_target(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="taps the stream attn_res"):
        open_target(save(make_model(llama()), tmp_path), "float32", (0,), tap_stream="attn_res")
