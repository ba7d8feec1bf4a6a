"""Opening a model directory: what is chosen, and what is said when it is not a usable one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from k3dspark.errors import BadInput
from k3dspark.model.packed import can_widen
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.loading import load_tokenizer, open_target
from k3dspark.target.transformers_target import TransformersTarget
from target.tiny import GEOMETRY, llama, make_model, qwen3, save

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(make_model(llama()), tmp_path)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(directory / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})


def test_a_llama_is_opened_in_the_lean_forward(directory: Path) -> None:
    assert isinstance(open_target(directory), LlamaTarget)


def test_everything_else_is_opened_through_transformers(tmp_path: Path) -> None:
    save(make_model(transformers.MistralConfig(**GEOMETRY)), tmp_path)
    assert isinstance(open_target(tmp_path, "float32"), TransformersTarget)


def test_a_llama_the_lean_forward_cannot_run_goes_through_transformers(tmp_path: Path) -> None:
    save(make_model(llama(mlp_bias=True)), tmp_path)
    assert isinstance(open_target(tmp_path, "float32"), TransformersTarget)
    with pytest.raises(BadInput, match="biases"):
        open_target(tmp_path, "float32", backend="lean")


@pytest.mark.parametrize("backend", ["lean", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_asked_dtype_is_the_dtype(directory: Path, backend: Any, dtype: Any) -> None:
    target = open_target(directory, dtype, backend=backend)
    asked = getattr(torch, dtype)
    if isinstance(target, LlamaTarget):  # whose activations our kernel keeps in fp32
        assert target.embed_weight.dtype == asked
        asked = torch.float32 if can_widen(target.embed_weight) else asked
    assert target.embed(torch.tensor([1])).dtype == asked


def test_int8_is_for_the_lean_forward_alone(directory: Path) -> None:
    with pytest.raises(BadInput, match="int8 needs the lean forward"):
        open_target(directory, "int8", backend="transformers")


@pytest.mark.parametrize("argument", [{"dtype": "int4"}, {"backend": "vllm"}])
def test_an_unknown_choice_is_refused(directory: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="unknown"):
        open_target(directory, **argument)


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 1)])
@pytest.mark.parametrize("backend", ["lean", "transformers"])
def test_taps_that_do_not_exist_are_refused(directory: Path, taps: tuple[int, ...], backend: Any) -> None:
    with pytest.raises(BadInput, match="tap layers"):
        open_target(directory, "float32", tap_layer_ids=taps, backend=backend)


def test_an_unknown_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no directory .*absent"):
        open_target(tmp_path / "absent")


def test_a_file_is_not_a_model_directory(directory: Path) -> None:
    with pytest.raises(BadInput, match="is not a directory"):
        open_target(directory / "config.json")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        open_target(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00"])
def test_a_config_that_is_no_json_object_is_refused(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"config\.json is not"):
        open_target(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", None), ("num_hidden_layers", "three"), ("vocab_size", 0), ("max_position_embeddings", True)],
)
def test_a_wrong_size_in_the_config_names_the_field(directory: Path, field: str, value: Any) -> None:
    change_config(directory, **{field: value})
    with pytest.raises(BadInput, match=field):
        open_target(directory)


def test_heads_that_do_not_divide_are_refused(directory: Path) -> None:
    change_config(directory, num_key_value_heads=4)
    with pytest.raises(BadInput, match="6 heads, 4 key-value heads"):
        open_target(directory)


def test_a_rope_without_its_numbers_is_refused(directory: Path) -> None:
    change_config(directory, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0})
    with pytest.raises(BadInput, match="rotary"):
        open_target(directory)


@pytest.mark.parametrize("backend", ["lean", "transformers"])
@pytest.mark.parametrize("kept_bytes", [4, 1000, -100])
def test_truncated_weights_are_refused(directory: Path, backend: Any, kept_bytes: int) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(BadInput, match="cannot"):
        open_target(directory, "float32", backend=backend)


@pytest.mark.parametrize("backend", ["lean", "transformers"])
def test_weights_that_are_no_safetensors_are_refused(directory: Path, backend: Any) -> None:
    (directory / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(BadInput, match="cannot"):
        open_target(directory, "float32", backend=backend)


@pytest.mark.parametrize("backend", ["lean", "transformers"])
def test_missing_weights_are_refused(directory: Path, backend: Any) -> None:
    (directory / WEIGHTS).unlink()
    with pytest.raises(BadInput):
        open_target(directory, "float32", backend=backend)


@pytest.mark.parametrize("backend", ["lean", "transformers"])
def test_a_missing_tensor_is_named_and_never_replaced_by_random_values(directory: Path, backend: Any) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(directory, **{name: None})
    with pytest.raises(BadInput, match=name):
        open_target(directory, "float32", backend=backend)


def test_a_missing_qk_norm_is_not_left_out(tmp_path: Path) -> None:
    save(make_model(qwen3()), tmp_path)
    change_tensors(tmp_path, **{"model.layers.0.self_attn.q_norm.weight": None})
    with pytest.raises(BadInput, match=r"q_norm\.weight is missing"):
        open_target(tmp_path)


@pytest.mark.parametrize("backend", ["lean", "transformers"])
def test_a_tensor_of_another_shape_is_refused(directory: Path, backend: Any) -> None:
    change_tensors(directory, **{"model.norm.weight": torch.ones(47)})
    with pytest.raises(BadInput):
        open_target(directory, "float32", backend=backend)


def test_quantised_tensors_are_refused(directory: Path) -> None:
    change_tensors(directory, **{"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(BadInput, match="quantised or foreign"):
        open_target(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(make_model(llama()), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadInput, match=shard.name):
        open_target(tmp_path)


def test_a_damaged_index_is_refused(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(BadInput, match="not a weight index"):
        open_target(directory)


def test_an_encoder_is_not_a_causal_model(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="not a causal language model"):
        open_target(tmp_path)


def test_an_unknown_model_type_is_refused(directory: Path) -> None:
    change_config(directory, model_type="no_such_model")
    with pytest.raises(BadInput, match="cannot load"):
        open_target(directory)


def test_code_in_a_checkpoint_is_never_run(directory: Path) -> None:
    marker = directory / "ran"
    (directory / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_config(directory, model_type="evil", auto_map={"AutoConfig": "modeling_evil.EvilConfig"})
    with pytest.raises(BadInput):
        open_target(directory)
    assert not marker.exists()


def test_a_directory_without_a_tokenizer_says_so(directory: Path) -> None:
    with pytest.raises(BadInput, match="tokenizer"):
        load_tokenizer(directory)


def test_a_tokenizer_is_loaded_from_the_directory(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    assert load_tokenizer(directory)("b a b").input_ids == [1, 0, 1]
