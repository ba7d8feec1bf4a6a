"""Drafts on disk: strict on the way in, whole or absent on the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3dspark.checkpoint.inventory import expected_tensors, file_bytes
from k3dspark.checkpoint.pointer import Pointer, pointer_text
from k3dspark.checkpoint.published import tiny_config
from k3dspark.errors import BadInput, K3DSparkError
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft, save_draft

VOCABULARY, WIDTH = 320, 32


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for spec in expected_tensors(config).values():
        if spec.dtype == "I64":
            tensors[spec.name] = (
                torch.randperm(config["vocab_size"], generator=generator)[: spec.shape[0]].sort().values
            )
        else:
            dtype = getattr(torch, config["torch_dtype"])
            tensors[spec.name] = torch.randn(spec.shape, generator=generator).to(dtype)
    return tensors


def head_rows(seed: int = 1) -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed))


def write(directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    config = config or tiny_config()
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors if tensors is not None else random_tensors(config), directory / "model.safetensors")
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = write(tmp_path / "draft")
    save_file({"lm_head.weight": head_rows()}, directory / "lm_head.safetensors")
    return directory


def state(model: K3DSparkModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# -- what the model is, against the inventory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "count", "parameters"),
    [({}, 68, 3_562_312_961), ({"fc_norm": True}, 73, 3_562_348_801)],
    ids=["published", "fc_norm"],
)
def test_the_model_at_published_geometry_is_the_inventory(
    switches: dict[str, Any], count: int, parameters: int
) -> None:
    config = K3DSparkConfig(**{**K3DSparkConfig.published().mapping(), **switches})
    with torch.device("meta"):
        model = K3DSparkModel(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: spec.shape for name, spec in expected_tensors(config.mapping()).items()}
    assert len(shapes) == count
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    "switches",
    [
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
        {"draft_vocab_size": 100},
        {"num_hidden_layers": 2, "block_causal": True},
    ],
    ids=lambda switches: ",".join(switches),
)
def test_every_variant_of_the_model_is_the_inventory_and_loads(tmp_path: Path, switches: dict[str, Any]) -> None:
    config = {**tiny_config(), **switches}
    tensors = random_tensors(config)
    model = load_draft(write(tmp_path / "draft", config, tensors), target_lm_head=head_rows())
    assert_equal(state(model), tensors)


# -- loading ------------------------------------------------------------------------------------------------------


def test_loading_reads_every_tensor_and_the_separate_head(checkpoint: Path) -> None:
    model = load_draft(checkpoint)
    assert_equal(state(model), load_file(checkpoint / "model.safetensors"))
    assert model.lm_head is not None
    assert torch.equal(model.lm_head, head_rows())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers(), model.rope.frequencies])


def test_a_loaded_draft_drafts(checkpoint: Path) -> None:
    model = load_draft(checkpoint)
    cache = model.new_cache()
    cache.append(model.context_rows(torch.randn(3, 160), torch.arange(3)))
    proposal = model.propose([cache], torch.tensor([5]), torch.tensor([3]))
    assert proposal.tokens.shape == (1, 7)


def test_weights_are_converted_only_when_asked(checkpoint: Path) -> None:
    assert load_draft(checkpoint).dtype is torch.float32
    model = load_draft(checkpoint, dtype=torch.bfloat16)
    assert {t.dtype for t in state(model).values()} == {torch.bfloat16}
    assert model.lm_head is not None
    assert model.lm_head.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: {"context_proj.weight": "fc.weight", "context_norm.weight": "hidden_norm.weight"}.get(
            name, "norm.weight" if name == "final_norm.weight" else name
        ),
        lambda name: f"model.{name}",
        lambda name: f"draft_model.{name}",
        lambda name: name if "_head" in name else f"model.{name}",
    ],
    ids=["family B", "model.", "draft_model.", "model. except the heads"],
)
def test_other_naming_families_load_the_same_draft(tmp_path: Path, rename: Callable[[str], str]) -> None:
    tensors = random_tensors(tiny_config())
    directory = write(tmp_path / "draft", tensors={rename(name): value for name, value in tensors.items()})
    assert_equal(state(load_draft(directory, target_lm_head=head_rows())), tensors)


def test_a_head_inside_the_model_file_is_found(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    model = load_draft(write(tmp_path / "draft", tensors={**tensors, "lm_head.weight": head_rows()}))
    assert_equal(state(model), tensors)
    assert model.lm_head is not None
    assert torch.equal(model.lm_head, head_rows())


def test_shards_are_joined_by_their_index(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:30], "model-00002-of-00002.safetensors": names[30:]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, checkpoint / file)
    index = {"weight_map": {name: file for file, members in halves.items() for name in members}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    assert_equal(state(load_draft(checkpoint)), tensors)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a\\b.safetensors", "model.bin", ""])
def test_an_index_may_not_point_out_of_the_directory(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadInput, match="not a safetensors file in this directory"):
        load_draft(checkpoint)


def test_the_target_supplies_what_a_sharing_draft_leaves_out(tmp_path: Path) -> None:
    config = {**tiny_config(), "share_target_embeddings": True}
    directory = write(tmp_path / "draft", config)
    embed, head = head_rows(2), head_rows(3)
    model = load_draft(directory, target_embed=embed, target_lm_head=head)
    assert model.embed_tokens.weight.data_ptr() == embed.data_ptr()  # shared, not copied
    assert model.lm_head is not None
    assert model.lm_head.data_ptr() == head.data_ptr()
    with pytest.raises(BadInput, match="uses the target's embed_tokens"):
        load_draft(directory)


def test_the_drafts_own_embedding_and_head_win_over_the_targets(checkpoint: Path) -> None:
    model = load_draft(checkpoint, target_embed=head_rows(2), target_lm_head=head_rows(3))
    assert model.lm_head is not None
    assert torch.equal(model.lm_head, head_rows(1))
    assert torch.equal(model.embed_tokens.weight, load_file(checkpoint / "model.safetensors")["embed_tokens.weight"])


def test_tied_embeddings_serve_as_the_head(tmp_path: Path) -> None:
    model = load_draft(write(tmp_path / "draft", {**tiny_config(), "tie_word_embeddings": True}))
    assert model.lm_head is not None
    assert model.lm_head.data_ptr() == model.embed_tokens.weight.data_ptr()


def test_without_any_head_the_error_names_the_file_its_size_and_the_way_to_get_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "draft")
    with pytest.raises(BadInput) as caught:
        load_draft(directory)
    error = caught.value
    assert "lm_head.safetensors is missing" in error.what
    assert "tie_word_embeddings is false" in error.why
    assert f"k3dspark fetch --repull --to {directory}" in error.remedy
    assert "41,048 bytes" in error.remedy


def test_a_draft_vocabulary_takes_its_rows_of_the_targets_head(tmp_path: Path) -> None:
    config = {**tiny_config(), "draft_vocab_size": 100}
    tensors = random_tensors(config)
    model = load_draft(write(tmp_path / "draft", config, tensors), target_lm_head=head_rows())
    assert model.lm_head is not None
    assert torch.equal(model.lm_head, head_rows()[tensors["d2t"]])


@pytest.mark.parametrize("ids", [torch.arange(100) + 250, torch.zeros(100, dtype=torch.int64), torch.arange(-1, 99)])
def test_impossible_draft_token_ids_are_refused(tmp_path: Path, ids: Tensor) -> None:
    config = {**tiny_config(), "draft_vocab_size": 100}
    tensors = {**random_tensors(config), "d2t": ids}
    with pytest.raises(BadInput, match="d2t"):
        load_draft(write(tmp_path / "draft", config, tensors), target_lm_head=head_rows())


# -- what is refused ----------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.3.mlp.up_proj.weight"), "layers.3.mlp.up_proj.weight is missing"),
        (without("embed_tokens.weight"), "embed_tokens.weight is missing"),
        (lambda t: t | {"layers.5.mlp.up_proj.weight": torch.ones(1)}, "layers.5.mlp.up_proj.weight has no place"),
        (lambda t: t | {"fc_norm.0.weight": torch.ones(32)}, "fc_norm.0.weight has no place"),
        (lambda t: t | {"final_norm.weight": torch.ones(33)}, r"final_norm.weight has shape \[33\]"),
        (lambda t: t | {"final_norm.weight": torch.ones(32).half()}, "final_norm.weight has dtype F16"),
        (lambda t: t | {"norm.weight": torch.ones(32)}, "final_norm.weight is there twice"),
        (lambda t: t | {"lm_head.weight": torch.ones(7, 32)}, r"lm_head.weight has shape \[7, 32\]"),
        (lambda _: {}, "is missing"),
    ],
    ids=["missing", "embedding", "surplus layer", "fc_norm", "shape", "dtype", "twice", "head shape", "empty"],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    directory = write(tmp_path / "draft", tensors=change(random_tensors(tiny_config())))
    with pytest.raises(BadInput, match=message):
        load_draft(directory, target_lm_head=head_rows())


@pytest.mark.parametrize("file", ["model.safetensors", "lm_head.safetensors"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cut short by 1 bytes"),
        (lambda data: data + b"\0", "too long by 1 bytes"),
        (lambda data: pointer_text(Pointer("ab" * 32, 2_348_810_336)), "Git LFS pointer"),
        (lambda data: b"PK\x03\x04" + data, "pickle or zip"),
        (lambda data: b"", "not a sound safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "not a sound safetensors file"),
    ],
    ids=["truncated", "overlong", "pointer", "pickle", "empty", "header length"],
)
def test_damaged_files_are_refused_by_name(
    checkpoint: Path, file: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = checkpoint / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=message) as caught:
        load_draft(checkpoint)
    assert file in str(caught.value)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(BadInput, match="is missing in"):
        load_draft(tmp_path)
    with pytest.raises(BadInput):
        load_draft(tmp_path / "nowhere")


def test_pickled_weights_are_never_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    torch.save(random_tensors(tiny_config()), tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput, match="is missing in"):
        load_draft(tmp_path)


@pytest.mark.parametrize("argument", ["target_embed", "target_lm_head"])
def test_a_target_of_another_size_is_refused(tmp_path: Path, argument: str) -> None:
    directory = write(tmp_path / "draft", {**tiny_config(), "share_target_embeddings": True})
    given = {"target_embed": head_rows(), "target_lm_head": head_rows(), argument: torch.zeros(VOCABULARY, WIDTH + 1)}
    with pytest.raises(BadInput, match=r"has shape \[320, 33\]"):
        load_draft(directory, **given)


# -- saving -------------------------------------------------------------------------------------------------------


def test_a_saved_draft_loads_bitwise_equal_in_the_published_layout(checkpoint: Path, tmp_path: Path) -> None:
    model = load_draft(checkpoint)
    save_draft(model, tmp_path / "saved", include_lm_head=True)
    again = load_draft(tmp_path / "saved")
    assert_equal(state(again), state(model))
    assert again.lm_head is not None
    assert torch.equal(again.lm_head, head_rows())
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == tiny_config()
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "lm_head.safetensors",
        "model.safetensors",
    ]
    # byte for byte what the safetensors library writes
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_saving_in_another_dtype_says_so_in_the_config(checkpoint: Path, tmp_path: Path) -> None:
    save_draft(load_draft(checkpoint), tmp_path / "saved", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == tiny_config() | {"torch_dtype": "bfloat16"}
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert size == file_bytes(expected_tensors(config).values())
    assert load_draft(tmp_path / "saved", target_lm_head=head_rows()).dtype is torch.bfloat16


def test_a_draft_can_be_saved_without_the_embedding_it_shares(checkpoint: Path, tmp_path: Path) -> None:
    model = load_draft(checkpoint)
    save_draft(model, tmp_path / "saved", share_target_embeddings=True)
    assert "embed_tokens.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    again = load_draft(tmp_path / "saved", target_embed=model.embed_tokens.weight, target_lm_head=head_rows())
    assert_equal(state(again), state(model))


def test_saving_over_an_older_draft_leaves_nothing_of_it(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    model = load_draft(checkpoint)
    save_draft(model, checkpoint)
    assert sorted(p.name for p in checkpoint.iterdir()) == ["config.json", "model.safetensors"]


def test_an_interrupted_save_leaves_the_earlier_draft_untouched(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    model = load_draft(checkpoint)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_draft(model, checkpoint)
    assert {p.name: p.read_bytes() for p in checkpoint.iterdir()} == before


def test_a_head_that_is_not_whole_cannot_be_saved(tmp_path: Path) -> None:
    config = {**tiny_config(), "draft_vocab_size": 100}
    model = load_draft(write(tmp_path / "draft", config), target_lm_head=head_rows())
    with pytest.raises(BadInput, match="no whole lm_head"):
        save_draft(model, tmp_path / "saved", include_lm_head=True)


def test_a_config_changed_after_the_model_was_built_is_not_saved(checkpoint: Path, tmp_path: Path) -> None:
    model = load_draft(checkpoint)
    model.config.intermediate_size = 65
    with pytest.raises(K3DSparkError, match="has shape"):
        save_draft(model, tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
