"""Launch directories: what is in them, that shells and daemons accept it, and what is refused before a file exists."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.deploy.launch_files import launch_files, read_launch_directory, rewrite, write_launch_files
from k3dspark.deploy.options import DraftFacts, LaunchWish, settle
from k3dspark.errors import BadInput
from manifest_schema import problems

K3 = DraftFacts.of(published_config())
ASCEND = LaunchWish(
    engine="vllm-ascend", draft="/models/draft", target="/models/Kimi-K3-w4a8", quantization="ascend", nodes=4,
    devices=16, hosts=("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), device="npu-a3",
)  # fmt: skip
WISHES = {
    "four A3 nodes": ASCEND,
    "eight A2 nodes": replace(ASCEND, device="npu-a2", nodes=8, devices=8, hosts=(), interface="enp196s0f0"),
    "one CUDA node": LaunchWish("vllm", "/models/it's a draft", "/models/K3", devices=8, sampling="probabilistic",
                                rejection="block", cache_dtype="fp8", lengths=((1, 4, 7), (5, 16, 3))),
    "two CUDA nodes": LaunchWish("vllm", "/d", "/t", nodes=2, devices=8, prefix_caching=True),
    "a CPU": LaunchWish("vllm", "/d", "/t", device="cpu"),
    "SGLang on NPUs": replace(ASCEND, engine="sglang", quantization="modelslim", adaptive=True,
                              build_has=("k3_mla_draft",)),
    "SGLang on CUDA": LaunchWish("sglang", "/d", "/t", device="cuda", devices=8, build_has=("k3_mla_draft",)),
}  # fmt: skip
every_wish = pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES.keys())


def command_of(directory: Path, node: int, tmp_path: Path, facts: DraftFacts, wish: LaunchWish) -> list[str]:
    """The words that the node's script really hands to the engine."""
    draft = tmp_path / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "run"
    write_launch_files(facts, replace(wish, draft=str(draft), python=str(python)), out, force=out.exists())
    done = subprocess.run([out / f"node-{node}.sh"], capture_output=True, check=True, timeout=30)
    return done.stdout.decode().split("\0")[:-1]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@every_wish
def test_scripts_pass_shellcheck(wish: LaunchWish, tmp_path: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    out = write_launch_files(K3, wish, tmp_path / "out").path
    scripts = [out / name for name in ("node-0.sh", "health.sh", "supervise.sh")]
    done = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@every_wish
def test_bash_parses_every_script(wish: LaunchWish, tmp_path: Path) -> None:
    out = write_launch_files(K3, wish, tmp_path / "out").path
    for script in out.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""
        assert os.access(script, os.X_OK)


@every_wish
def test_every_option_and_variable_is_preceded_by_its_reason(wish: LaunchWish) -> None:
    _, files = launch_files(K3, replace(wish, home="/opt/run"))
    lines = files["node-0.sh"].splitlines()
    stated = [n for n, line in enumerate(lines) if line.startswith(("export HCCL", "export HF_HUB", "  --"))]
    assert stated
    assert [lines[n] for n in stated if not lines[n - 1].lstrip().startswith("#")] == []


@every_wish
def test_the_unit_is_accepted_by_systemd(wish: LaunchWish, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    out = write_launch_files(K3, wish, tmp_path / "a directory").path
    instance = tmp_path / "k3dspark@0.service"
    instance.write_text((out / "k3dspark@.service").read_text())
    done = subprocess.run(
        [program, "verify", "--man=no", instance], capture_output=True, text=True, check=False, timeout=60
    )
    assert [line for line in done.stderr.splitlines() if "k3dspark" in line] == []
    assert done.returncode == 0


@every_wish
def test_the_manifest_is_well_formed_and_carries_the_scripts(wish: LaunchWish) -> None:
    _, files = launch_files(K3, replace(wish, home="/opt/run"))
    objects = list(yaml.safe_load_all(files["kubernetes.yaml"]))
    assert problems(objects) == []
    data = objects[0]["data"]
    assert data["health.sh"] == files["health.sh"]
    assert len([name for name in data if name.startswith("node-")]) == wish.nodes
    pods = objects[-1]["spec"]
    assert pods["replicas"] == wish.nodes
    assert "127.0.0.1" not in data["node-0.sh"].split("options=(")[1]


def test_the_manifest_validator_sees_faults() -> None:
    _, files = launch_files(K3, replace(ASCEND, home="/opt/run"))
    objects: list[Any] = list(yaml.safe_load_all(files["kubernetes.yaml"]))
    objects[-1]["spec"]["serviceName"] = "nobody"
    objects[-1]["spec"]["template"]["spec"]["volumes"].pop()
    del objects[1]["spec"]["selector"]
    assert len(problems(objects)) >= 3


def test_four_a3_nodes_are_started_as_validated(tmp_path: Path) -> None:
    _, files = launch_files(K3, replace(ASCEND, home="/opt/run"))
    for node in range(4):
        script = files[f"node-{node}.sh"]
        assert "--tensor-parallel-size 16" in script
        assert "--data-parallel-size 4" in script
        assert "--enable-expert-parallel" in script
        assert "export HCCL_CONNECT_TIMEOUT=1800" in script
        assert ("--headless" in script) == (node > 0)
        assert (f"--data-parallel-start-rank {node}" in script) == (node > 0)


def test_a2_gets_its_own_link_settings() -> None:
    _, files = launch_files(K3, replace(WISHES["eight A2 nodes"], home="/opt/run"))
    assert "HCCL_INTRA_ROCE_ENABLE=1" in files["node-3.sh"]
    assert "export HCCL_OP_EXPANSION_MODE" not in files["node-3.sh"]
    assert "interface=enp196s0f0" in files["node-3.sh"]


def test_the_engine_receives_the_draft_as_one_json_object(tmp_path: Path) -> None:
    wish = WISHES["one CUDA node"]
    words = command_of(tmp_path, 0, tmp_path, K3, wish)
    config = json.loads(after(words, "--speculative-config"))
    assert config == {
        "method": "dspark", "model": str(tmp_path / "draft"), "num_speculative_tokens": 7,
        "draft_tensor_parallel_size": 8, "draft_sample_method": "probabilistic", "rejection_sample_method": "block",
        "attention_backend": "FLASHINFER_MLA", "kv_cache_dtype": "fp8",
        "num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 16, 3]],
    }  # fmt: skip
    assert "--no-enable-prefix-caching" in words


def test_an_lfs_pointer_stops_the_script_before_the_engine_starts(tmp_path: Path) -> None:
    command_of(tmp_path, 0, tmp_path, K3, WISHES["a CPU"])
    pointer = tmp_path / "draft" / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7124633402\n")
    done = subprocess.run([tmp_path / "run" / "node-0.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 66
    assert "Git LFS pointer" in done.stderr
    pointer.unlink()
    assert subprocess.run([tmp_path / "run" / "node-0.sh"], capture_output=True, check=False).returncode == 66


def test_a_host_that_is_only_this_machine_stops_a_cluster_script(tmp_path: Path) -> None:
    wish = replace(WISHES["two CUDA nodes"], hosts=("localhost", "other"))
    out = write_launch_files(K3, wish, tmp_path / "out").path
    done = subprocess.run([out / "node-0.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 65
    assert "127.0.0.1" in done.stderr


REFUSED = [
    ({"version": "0.23.0"}, "0.26.0rc1"),
    ({"sampling": "probabilistic"}, "#13730"),
    ({"rejection": "block", "sampling": "probabilistic"}, "#13730"),
    ({"adaptive": True}, "#15098"),
    ({"decode_context_parallel": 2}, "#52269"),
    ({"pipeline_parallel": 2}, "#15703"),
    ({"rejection": "synthetic"}, "no longer the target's"),
    ({"draft_tensor_parallel": 4}, "1 or the target's size"),
    ({"draft_tokens": 8}, "7 tokens"),
    ({"context": 2_000_000}, "1048576"),
    ({"device": "cuda"}, "npu-a3"),
    ({"hosts": ("a", "b")}, "4 nodes"),
    ({"hosts": ("a", "b", "c", "a")}, "twice"),
    ({"hosts": ("a", "b", "c", "d; rm -rf /")}, "names or addresses"),
    ({"served_name": "a\nb"}, "letters"),
    ({"draft": "/d\nrm"}, "line break"),
    ({"port": 13389}, "two different"),
    ({"tensor_parallel": 3}, "16 devices"),
    ({"lengths": ((2, 4, 7),)}, "from 1 on"),
    ({"build_has": ("wings",)}, "known are"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_engine_cannot_do_is_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        settle(K3, replace(ASCEND, **change))
    assert words in str(refused.value)


def test_a_build_with_an_open_change_is_believed_and_warned_about() -> None:
    wish = replace(ASCEND, decode_context_parallel=2, build_has=("decode_context_parallel",))
    settled = settle(K3, wish)
    assert "build_has.decode_context_parallel" in {hazard.id for hazard in settled.warnings}


def test_adaptive_verification_and_eager_mode_exclude_each_other() -> None:
    wish = LaunchWish("vllm", "/d", "/t", adaptive=True, eager=True, build_has=("adaptive_verification",))
    with pytest.raises(BadInput, match="--eager"):
        settle(K3, wish)


def test_other_targets_get_none_of_kimi_k3s_options() -> None:
    _, files = launch_files(DraftFacts.of(tiny_config()), replace(WISHES["one CUDA node"], home="/o", devices=4,
                                                                   context=1024))  # fmt: skip
    assert "kimi_k3" not in files["node-0.sh"]
    assert "--enable-expert-parallel" not in files["node-0.sh"]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = write_launch_files(K3, ASCEND, tmp_path / "out")
    read = read_launch_directory(tmp_path / "out")
    assert read.settled == written.settled
    assert read.hosts == ASCEND.hosts
    assert read.changed() == []


def test_an_older_plan_is_replaced_only_when_forced_and_other_files_never(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_launch_files(K3, ASCEND, out)
    with pytest.raises(BadInput, match="--force"):
        write_launch_files(K3, WISHES["a CPU"], out)
    write_launch_files(K3, WISHES["a CPU"], out, force=True)
    assert sorted(p.name for p in out.glob("node-*")) == ["node-0.sh"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(BadInput, match="would be lost"):
        write_launch_files(K3, ASCEND, tmp_path / "mine", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        write_launch_files(K3, replace(ASCEND, version="0.23.0"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_writing_again_keeps_corrected_hosts_and_notices_edited_scripts(tmp_path: Path) -> None:
    directory = write_launch_files(K3, WISHES["eight A2 nodes"], tmp_path / "out")
    (tmp_path / "out" / "hosts").write_text("\n".join(f"npu{n}.lab" for n in range(8)) + "\n")
    again = rewrite(directory, lengths=((1, 16, 5),))
    assert again.hosts[7] == "npu7.lab"
    assert "[[1, 16, 5]]" in (tmp_path / "out" / "node-0.sh").read_text()
    with (tmp_path / "out" / "node-1.sh").open("a") as script:
        script.write("# mine\n")
    with pytest.raises(BadInput, match=r"node-1\.sh"):
        rewrite(read_launch_directory(tmp_path / "out"), lengths=())


@pytest.mark.parametrize(
    "text", ['{"format": 2}', '{"format": 1}', '{"format": 1, "wish": {}, "draft": {}, "files": {}}', "["]
)
def test_a_damaged_plan_is_an_error_and_no_traceback(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BadInput):
        read_launch_directory(tmp_path)


def test_quoting_survives_hostile_paths(tmp_path: Path) -> None:
    hostile = "/models/$(touch owned) \"'`x`"
    _, files = launch_files(K3, replace(WISHES["a CPU"], target=hostile, home="/opt/run"))
    line = next(line for line in files["node-0.sh"].splitlines() if "--model " in line)
    assert shlex.split(line)[-1] == hostile
