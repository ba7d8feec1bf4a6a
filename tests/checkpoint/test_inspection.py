"""`inspect_checkpoint`: one fault in a directory gives that finding and no other, with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3dspark.checkpoint.inspection import Inspection, inspect_checkpoint
from k3dspark.checkpoint.manifest import Manifest, ManifestFile, sha256_file, write_manifest
from k3dspark.checkpoint.pointer import Pointer, pointer_text
from k3dspark.checkpoint.report import inspection_as_json
from k3dspark.checkpoint.synth import synthesise
from k3dspark.errors import BadInput

Change = Callable[[Path], None]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "pair"
    synthesise(directory, tiny=True)
    record(directory / "draft")
    return directory


def record(draft: Path) -> None:
    files = [
        ManifestFile(p.name, p.stat().st_size, sha256_file(p), "lfs") for p in sorted(draft.iterdir()) if p.is_file()
    ]
    write_manifest(
        draft, Manifest("git:https://example.org/x.git", "0" * 40, "2026-11-30T00:00:00Z", "test", tuple(files))
    )


@pytest.fixture
def pair(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "pair"))


def config(name: str, value: Any, *, drop: bool = False) -> Change:
    def change(draft: Path) -> None:
        path = draft / "config.json"
        mapping = json.loads(path.read_text())
        *outer, last = name.split(".")
        place = mapping
        for key in outer:
            place = place[key]
        place[last] = value
        if drop:
            del place[last]
        path.write_text(json.dumps(mapping))

    return change


def config_text(edit: Callable[[str], str]) -> Change:
    def change(draft: Path) -> None:
        path = draft / "config.json"
        path.write_text(edit(path.read_text()))

    return change


def tensors(edit: Callable[[dict[str, Any]], dict[str, Any]], file: str = "model.safetensors") -> Change:
    def change(draft: Path) -> None:
        save_file(edit(load_file(draft / file)), draft / file)

    return change


def data(edit: Callable[[bytes], bytes], file: str = "model.safetensors") -> Change:
    return lambda draft: (draft / file).write_bytes(edit((draft / file).read_bytes())) and None


def remove(file: str) -> Change:
    return lambda draft: (draft / file).unlink()


def pointer(file: str) -> Change:
    return lambda draft: (draft / file).write_bytes(pointer_text(Pointer("ab" * 32, 7_124_633_402))) and None


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {key: value for key, value in found.items() if key != name}


def both(*changes: Change) -> Change:
    def change(draft: Path) -> None:
        for one in changes:
            one(draft)

    return change


def symlink_out(draft: Path) -> None:
    (draft / "lm_head.safetensors").unlink()
    (draft / "lm_head.safetensors").symlink_to("/etc/passwd")


def renamed_prefix(found: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in found.items()}


FAULTS: dict[str, tuple[Change, str, str]] = {
    "pointer": (pointer("model.safetensors"), "file.lfs_pointer", "model.safetensors"),
    "pointer for the head": (pointer("lm_head.safetensors"), "file.lfs_pointer", "lm_head.safetensors"),
    "pointer for the config": (pointer("config.json"), "file.lfs_pointer", "config.json"),
    "truncated by 1 byte": (data(lambda d: d[:-1]), "file.truncated", "model.safetensors"),
    "over-long by 1 byte": (data(lambda d: d + b"\0"), "file.overlong", "model.safetensors"),
    "empty": (data(lambda d: b""), "file.not_safetensors", "model.safetensors"),
    "header length lying": (
        data(lambda d: b"\xff\xff\x0f\0\0\0\0\0" + d[8:]),
        "file.header_length",
        "model.safetensors",
    ),
    "1 GB header claim": (
        data(lambda d: struct.pack("<Q", 1 << 30) + d[8:]),
        "file.header_length",
        "model.safetensors",
    ),
    "header is not JSON": (data(lambda d: d[:8] + b"[" + d[9:]), "file.not_safetensors", "model.safetensors"),
    "header with duplicate keys": (
        data(
            lambda d: d.replace(b"confidence_head.proj.weight", b'confidence_head.proj.bias",""', 1),
            "model.safetensors",
        ),
        "file.header_json",
        "model.safetensors",
    ),
    "a pickle": (data(lambda d: b"PK\x03\x04" + d), "file.pickle", "model.safetensors"),
    "weights missing": (remove("model.safetensors"), "file.missing_file", "model.safetensors"),
    "tensor missing": (
        tensors(without("layers.3.mlp.up_proj.weight")),
        "tensor.missing",
        "layers.3.mlp.up_proj.weight",
    ),
    "tensor surplus": (
        tensors(lambda t: t | {"extra.weight": np.ones(2, np.float32)}),
        "tensor.surplus",
        "extra.weight",
    ),
    "tensor twice": (
        tensors(lambda t: t | {"norm.weight": t["final_norm.weight"]}),
        "tensor.doubled",
        "final_norm.weight",
    ),
    "wrong shape": (
        tensors(lambda t: t | {"final_norm.weight": np.ones(33, np.float32)}),
        "tensor.shape",
        "final_norm.weight",
    ),
    "wrong dtype": (
        tensors(lambda t: t | {"final_norm.weight": np.ones(32, np.float16)}),
        "tensor.dtype",
        "final_norm.weight",
    ),
    "lm_head missing": (remove("lm_head.safetensors"), "lm_head.missing", "lm_head.safetensors"),
    "lm_head of another shape": (
        tensors(lambda t: {"lm_head.weight": np.ones((319, 32), np.float32)}, "lm_head.safetensors"),
        "tensor.shape",
        "lm_head.weight",
    ),
    "lm_head under another name": (
        tensors(lambda t: {"head": t["lm_head.weight"]}, "lm_head.safetensors"),
        "tensor.missing",
        "lm_head.weight",
    ),
    "factor halved": (config("rope_parameters.factor", 16.0), "rule.rope.product", "rope_parameters.factor"),
    "original length changed": (
        config("rope_parameters.original_max_position_embeddings", 32),
        "rule.rope.product",
        "rope_parameters.factor",
    ),
    "taps unsorted": (config("target_layer_ids", [2, 0, 3, 5, 6]), "rule.taps.sorted", "target_layer_ids"),
    "taps doubled": (config("target_layer_ids", [0, 2, 2, 5, 6]), "rule.taps.distinct", "target_layer_ids"),
    "taps out of range": (config("target_layer_ids", [0, 2, 3, 5, 8]), "rule.taps.in_range", "target_layer_ids"),
    "taps of wrong count": (config("target_layer_ids", [0, 2, 3, 5]), "rule.taps.count", "target_layer_ids"),
    "number of taps wrong": (config("num_target_layers", 4), "rule.taps.count", "target_layer_ids"),
    "mask id out of range": (config("mask_token_id", 320), "rule.ids.mask", "mask_token_id"),
    "tied": (config("tie_word_embeddings", True), "config.tied", "tie_word_embeddings"),
    "draft vocabulary smaller": (config("draft_vocab_size", 200), "config.contradicts_weights", "draft_vocab_size"),
    "draft vocabulary larger": (config("draft_vocab_size", 321), "rule.vocabulary.draft", "draft_vocab_size"),
    "NaN": (config("rms_norm_eps", float("nan")), "rule.kind.rms_norm_eps", "rms_norm_eps"),
    "string for a number": (config("hidden_size", "32"), "rule.kind.hidden_size", "hidden_size"),
    "field missing": (config("kv_lora_rank", 0, drop=True), "rule.kind.kv_lora_rank", "kv_lora_rank"),
    "theta lost": (config("rope_parameters.rope_theta", 10000.0), "rule.rope.theta_agrees", "rope_theta"),
    "mscale_all_dim lost": (
        config("rope_parameters.mscale_all_dim", 1, drop=True),
        "rule.rope.yarn_mscale_all_dim",
        "rope_parameters.mscale_all_dim",
    ),
    "mla_use_nope": (config("mla_use_nope", True), "rule.mla.nope", "mla_use_nope"),
    "output gate": (config("mla_use_output_gate", True), "rule.mla.output_gate", "mla_use_output_gate"),
    "dtype in the config": (config("torch_dtype", "float16"), "config.contradicts_weights", "torch_dtype"),
    "layers in the config": (config("num_hidden_layers", 5 - 1), "config.contradicts_weights", "num_hidden_layers"),
    "vocabulary in the config": (
        both(config("vocab_size", 321), config("draft_vocab_size", 321)),
        "config.contradicts_weights",
        "vocab_size",
    ),
    "intermediate size in the config": (
        config("intermediate_size", 65),
        "config.contradicts_weights",
        "intermediate_size",
    ),
    "fc_norm in the config": (config("fc_norm", True), "config.contradicts_weights", "fc_norm"),
    "markov kind in the config": (
        config("markov_head_type", "gated"),
        "config.contradicts_weights",
        "markov_head_type",
    ),
    "duplicate keys in the config": (
        config_text(lambda t: t.replace("{", '{"hidden_size": 32,', 1)),
        "config.unreadable",
        "config.json",
    ),
    "deep nesting in the config": (config_text(lambda t: "[" * 100_000), "config.unreadable", "config.json"),
    "config is not JSON": (config_text(lambda t: t[:-5]), "config.unreadable", "config.json"),
    "config is not UTF-8": (data(lambda d: d + b"\xff", "config.json"), "config.unreadable", "config.json"),
    "config missing": (remove("config.json"), "config.missing", "config.json"),
    "a symlink that leaves": (symlink_out, "file.symlink", "lm_head.safetensors"),
    "sha256 mismatch": (data(lambda d: d[:-1] + b"\x07"), "manifest.sha256", "model.safetensors"),
    "manifest damaged": (
        lambda draft: (draft / ".k3dspark/manifest.json").write_text('{"format": 1}') and None,
        "manifest.damaged",
        ".k3dspark/manifest.json",
    ),
}


def errors(inspection: Inspection) -> list[tuple[str, str]]:
    return [(finding.id, finding.subject) for finding in inspection.findings if finding.level == "error"]


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_gives_one_finding(pair: Path, name: str) -> None:
    change, identifier, subject = FAULTS[name]
    draft = pair / "draft"
    change(draft)
    if identifier.split(".")[0] not in ("manifest",):
        shutil.rmtree(draft / ".k3dspark")  # the manifest would rightly object to every edited file
    inspection = inspect_checkpoint(draft)
    assert errors(inspection) == [(identifier, subject)]
    assert not inspection.complete
    assert all(finding.what and finding.why and finding.remedy for finding in inspection.findings)
    json.dumps(inspection_as_json(inspection))


@pytest.mark.parametrize(
    "name", ["pointer", "truncated by 1 byte", "tensor missing", "lm_head missing", "factor halved"]
)
def test_the_manifest_does_not_repeat_a_fault_that_has_a_name(pair: Path, name: str) -> None:
    change, identifier, subject = FAULTS[name]
    change(pair / "draft")
    found = errors(inspect_checkpoint(pair / "draft"))
    assert found[0] == (identifier, subject)
    assert {i for i, s in found[1:]} <= {"manifest.size", "manifest.sha256"}
    assert len({s for _, s in found}) == len(found)


def test_a_sound_directory_has_no_findings(pair: Path) -> None:
    inspection = inspect_checkpoint(pair / "draft", pair / "target", verify=True)
    assert inspection.findings == ()
    assert inspection.complete
    assert inspection.expected == inspection.found


def test_other_tensor_names_are_no_fault(pair: Path) -> None:
    shutil.rmtree(pair / "draft/.k3dspark")
    tensors(renamed_prefix)(pair / "draft")
    assert inspect_checkpoint(pair / "draft").findings == ()


def test_the_published_layout_is_recognised_with_its_sizes(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", sparse=True)
    inspection = inspect_checkpoint(tmp_path / "x")
    sizes = {file.name: (file.bytes, file.expected_bytes) for file in inspection.files if file.kind == "weights"}
    assert sizes == {
        "model.safetensors": (7_124_633_402, 7_124_633_402),
        "lm_head.safetensors": (2_348_810_336, 2_348_810_336),
    }
    assert inspection.found.parameters == 3_562_312_961 + 163840 * 7168
    assert inspection.public is not None
    assert "Eco-Tech/Kimi-K3-DSpark-MLA-NPU" in inspection.public.names
    assert inspection.complete


def test_two_pointers_are_named_with_their_real_sizes(tmp_path: Path) -> None:
    synthesise(tmp_path / "x", sparse=True)
    for name, size in (("model", 7_124_633_402), ("lm_head", 2_348_810_336)):
        path = tmp_path / "x" / f"{name}.safetensors"
        path.write_bytes(pointer_text(Pointer("cd" * 32, size)))
        assert path.stat().st_size == 135
    inspection = inspect_checkpoint(tmp_path / "x")
    assert errors(inspection) == [
        ("file.lfs_pointer", "model.safetensors"),
        ("file.lfs_pointer", "lm_head.safetensors"),
    ]
    assert "7,124,633,402" in inspection.findings[0].why
    assert "git lfs pull" in inspection.findings[0].remedy
    assert "k3dspark fetch --repull" in inspection.findings[0].remedy


@pytest.mark.parametrize(
    ("changes", "name", "runs"),
    [
        ({"target_layer_ids": [7, 31, 47, 63, 87], "fc_norm": True}, "lightseekorg/kimi-k3-dspark", True),
        ({"num_hidden_layers": 3, "num_attention_heads": 96}, "Inferact/Kimi-K3-DSpark-Block5", True),
        ({"target_layer_ids": [7, 23, 51, 67, 83], "num_key_value_heads": 16}, "RadixArk/Kimi-K3-DSpark", False),
        ({"speculators_config": {}}, "RedHatAI/Kimi-K3-speculator.dspark", False),
    ],
)
def test_public_drafts_are_told_apart(tmp_path: Path, changes: dict[str, Any], name: str, runs: bool) -> None:
    synthesise(tmp_path / "x", sparse=True)
    for key, value in changes.items():
        config(key, value)(tmp_path / "x")
    public = inspect_checkpoint(tmp_path / "x").public
    assert public is not None
    assert name in public.names[0]
    assert public.runs is runs


def test_a_public_draft_without_its_switch_is_a_warning(tmp_path: Path) -> None:
    from k3dspark.checkpoint.identity import identify, unsaid_switches
    from k3dspark.checkpoint.published import published_config

    light = {**published_config(), "target_layer_ids": [7, 31, 47, 63, 87], "fc_norm": True}
    public = identify(light)
    assert public is not None
    assert unsaid_switches(light, public) == [("aux_hidden_stream", "prefix", "attn_res")]


@pytest.mark.parametrize("make", ["nothing", "empty", "file", "other files"])
def test_where_there_is_no_model_the_error_says_so(tmp_path: Path, make: str) -> None:
    place = tmp_path / "x"
    if make == "file":
        place.write_text("")
    elif make != "nothing":
        place.mkdir()
    if make == "other files":
        (place / "README.md").write_text("hello")
    with pytest.raises(BadInput):
        inspect_checkpoint(place)


def test_a_hugging_face_cache_is_read_through_its_links(pair: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (pair / "draft").iterdir():
        if path.is_file():
            shutil.copy(path, blobs / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert inspect_checkpoint(snapshot).findings == ()


def test_pickles_beside_the_weights_are_a_warning(pair: Path) -> None:
    (pair / "draft" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    inspection = inspect_checkpoint(pair / "draft")
    assert [finding.id for finding in inspection.findings] == ["file.pickle"]
    assert inspection.complete


def test_verifying_without_a_manifest_is_a_fault(pair: Path) -> None:
    shutil.rmtree(pair / "draft/.k3dspark")
    assert errors(inspect_checkpoint(pair / "draft", verify=True)) == [("manifest.missing", ".k3dspark/manifest.json")]


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../b", ".git/config", ".k3dspark/manifest.json", "a\\b", "c:d"]
)
def test_a_manifest_that_names_a_path_outside_is_refused(pair: Path, path: str) -> None:
    manifest = json.loads((pair / "draft/.k3dspark/manifest.json").read_text())
    manifest["files"][0]["path"] = path
    (pair / "draft/.k3dspark/manifest.json").write_text(json.dumps(manifest))
    inspection = inspect_checkpoint(pair / "draft")
    assert errors(inspection) == [("manifest.damaged", ".k3dspark/manifest.json")]


def test_odd_directory_entries_are_survived(pair: Path) -> None:
    draft = pair / "draft"
    os.mkfifo(draft / "a.fifo")
    (draft / "dangling").symlink_to("nowhere")
    (draft / "self").symlink_to("self")
    (draft / os.fsdecode(b"\xff\xfe.txt")).write_text("x")
    (draft / "\x1b[31mred.txt").write_text("x")
    inspection = inspect_checkpoint(draft)
    assert {subject for _, subject in errors(inspection)} == {"dangling", "self"}


def test_inspection_stays_within_64_mib(pair: Path) -> None:
    shutil.rmtree(pair / "draft/.k3dspark")
    header = (
        b"{" + b",".join(b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(19_000)) + b"}"
    )
    (pair / "draft/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    del header
    tracemalloc.start()
    try:
        inspection = inspect_checkpoint(pair / "draft")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert [finding.id for finding in inspection.findings] == ["tensor.missing", "tensor.surplus"]


def test_many_large_headers_do_not_add_up(pair: Path) -> None:
    draft = pair / "draft"
    shutil.rmtree(draft / ".k3dspark")
    (draft / "model.safetensors").unlink()
    entry = b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    shards = [f"model-{shard:05}.safetensors" for shard in range(6)]
    for shard, name in enumerate(shards):
        header = b"{" + b",".join(entry % i for i in range(shard * 15_000, (shard + 1) * 15_000)) + b"}"
        (draft / name).write_bytes(struct.pack("<Q", len(header)) + header)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: n for n in shards}}))
    tracemalloc.start()
    try:
        found = errors(inspect_checkpoint(draft))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert ("file.too_many_tensors", shards[1]) in found
