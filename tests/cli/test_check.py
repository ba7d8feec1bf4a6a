"""`k3dspark check` as a user types it: on this machine's CPU, and on a node made of recorded output."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from fake_node import FakeNode

Plant = Callable[[FakeNode], object]

EVERY_LINE = {
    "draft": {"files", "config", "tensors", "source"},
    "target": {"complete", "geometry", "token_ids", "yarn", "embeddings"},
    "device": {"present", "health", "driver", "firmware", "cann", "bf16", "memory"},
    "software": {"python", "engine", "framework"},
    "host": {"disk", "shared_memory", "ports", "name"},
    "nodes": {"reachable", "names", "clock", "alike"},
    "links": {"load", "measured"},
}


def complete(items: list[dict[str, str]]) -> bool:
    ids = {item["id"] for item in items}
    return ids == {f"{section}.{line}" for section, lines in EVERY_LINE.items() for line in lines}


def test_on_this_machine_a_tiny_pair_passes_on_the_cpu(pristine_pair: Path) -> None:
    program = "from k3dspark.cli.main import main; main()"
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = str(probe.getsockname()[1])
    arguments = [str(pristine_pair / "draft"), "--target", str(pristine_pair / "target"), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", program, "check", *arguments, "--ports", port, "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert complete(report["items"])
    assert report["counts"]["fail"] == 0


def test_a_node_on_which_everything_is_right_passes_every_line(node: FakeNode) -> None:
    items = node.items()
    assert complete(items)
    by_id = {item["id"]: item for item in items}
    assert [item["id"] for item in items if item["status"] in ("fail", "warn")] == []
    assert "910B4 (family A2; product Atlas 800T A2)" in by_id["device.present"]["evidence"]
    assert "7.8.0.2.212" in by_id["device.firmware"]["evidence"]
    assert "as vLLM-Ascend 0.26.0rc1 wants" in by_id["device.cann"]["evidence"]
    assert "8 of 8 layers" in by_id["target.complete"]["evidence"]


def use_other_stop_token(node: FakeNode) -> None:
    node.edit("target/tokenizer_config.json", lambda m: m.update(bos_token="[UNK]"))


def yarn(factor: float) -> Plant:
    block = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64, "rope_theta": 50000.0}

    def plant(node: FakeNode) -> None:
        node.edit("target/config.json", lambda m: m.update(rope_parameters=block))

    return plant


def fill_memory(node: FakeNode) -> None:
    table = (node.root / "table.txt").read_text()
    node.npu_smi_text(table.replace("2922 / 32768", "32001/ 32768"))


def old_engine(node: FakeNode) -> None:
    node.install("vllm", "0.23.0")
    node.install("vllm-ascend", "0.23.0")


def write(place: str, data: bytes) -> Plant:
    return lambda node: (node.draft.parent / place).write_bytes(data)


def drop_layer(node: FakeNode) -> None:
    path = node.target / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if ".layers.5." not in name}
    save_file(tensors, path)


def shard(missing: bool = False, lying: bool = False) -> Plant:
    """Split the target in two shards with an index; leave one out, or let the index promise too much."""

    def plant(node: FakeNode) -> None:
        tensors = load_file(node.target / "model.safetensors")
        names = sorted(tensors)
        halves = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
        (node.target / "model.safetensors").unlink()
        weight_map = {}
        for file, part in halves.items():
            save_file({name: tensors[name] for name in part}, node.target / file)
            weight_map |= dict.fromkeys(part, file)
        if lying:
            weight_map["model.layers.3.extra"] = "model-2.safetensors"
        (node.target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        if missing:
            (node.target / "model-2.safetensors").unlink()

    return plant


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 7124633402\n"


@pytest.mark.parametrize(
    ("plant", "line", "words"),
    [
        (use_other_stop_token, "target.token_ids", "bos_token_id is 256 here and 318 there"),
        (yarn(16.0), "target.yarn", "factor 32.0 here and 16.0 there"),
        (fill_memory, "device.memory", "only 0.80 of 34.36 GB free"),
        (old_engine, "software.engine", "vLLM-Ascend 0.23.0 is too old: K3DSparkModel came with 0.26.0rc1"),
        (lambda n: n.npu_smi("310p3-24.1.txt"), "device.bf16", "310P3 (310P) has no bfloat16 units"),
        (lambda n: n.npu_smi("910a-first-generation.txt"), "device.bf16", "910ProA (910) has no bfloat16"),
        (lambda n: n.npu_smi("unhealthy-910b2.txt"), "device.health", "NPU 1 chip 0 reports Alarm"),
        (lambda n: n.npu_smi("no-chip.txt"), "device.present", "npu-smi lists no device"),
        (
            lambda n: n.tool("npu-smi", "echo 'dcmi module initialize failed. ret is -8005'; exit 1"),
            "device.present",
            "failed with status 1: dcmi module initialize failed. ret is -8005",
        ),
        (lambda n: (n.bin / "npu-smi").unlink(), "device.present", "npu-smi is not installed"),
        (
            lambda n: n.version_file("driver-23.0.3.info", "usr/local/Ascend/driver/version.info"),
            "device.firmware",
            "7.8.0.2.212 lies outside what driver 23.0.3 accepts: [6.4.0,6.4.99],[7.0.0,7.1.99]",
        ),
        (
            lambda n: n.version_file(
                "toolkit-8.3.RC2.info", "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"
            ),
            "device.cann",
            "8.3.RC2",
        ),
        (lambda n: n.install("torch-npu", "2.9.0"), "software.framework", "torch 2.10.0 with torch-npu 2.9.0"),
        (lambda n: n.install("vllm", "0.27.1"), "software.engine", "vLLM 0.27.1 beside vLLM-Ascend 0.26.0rc1"),
        (lambda n: n.edit("draft/config.json", lambda m: m.update(mla_use_nope=True)), "draft.config", "mla_use_nope"),
        (write("draft/model.safetensors", POINTER), "draft.files", "Git LFS pointer"),
        (write("target/model.safetensors", POINTER), "target.complete", "Git LFS pointer of"),
        (write("target/config.json", b"{"), "target.complete", "it is not JSON"),
        (drop_layer, "target.complete", "7 of 8 layers are in the weights; missing: 5"),
        (shard(missing=True), "target.complete", "model-2.safetensors: it is not there"),
        (shard(lying=True), "target.complete", "the index promises"),
        (
            lambda n: n.edit("target/config.json", lambda m: m.update(vocab_size=321)),
            "target.geometry",
            "vocab_size is 320, but the target's vocab_size is 321",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_a_planted_fault_fails_exactly_its_own_line(node: FakeNode, plant: Plant, line: str, words: str) -> None:
    plant(node)
    items = node.items()
    failed = [item for item in items if item["status"] == "fail"]
    assert [item["id"] for item in failed] == [line]
    assert words in failed[0]["evidence"]
    assert failed[0]["remedy"]


def test_an_equal_yarn_block_passes(node: FakeNode) -> None:
    yarn(32.0)(node)
    assert {item["id"]: item["status"] for item in node.items()}["target.yarn"] == "pass"


def test_a_sharded_target_is_whole(node: FakeNode) -> None:
    shard()(node)
    evidence = {item["id"]: item["evidence"] for item in node.items()}["target.complete"]
    assert "8 of 8 layers in 2 files" in evidence


def test_a_taken_port_is_named_with_the_command_that_finds_its_owner(node: FakeNode) -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = server.getsockname()[1]
        result = node.check("--ports", str(port))
    assert result.exit_code == 1
    assert f"{port} is taken by another program" in result.stdout
    assert f"ss -ltnp sport = :{port}" in result.stdout
    assert "1 failed" in result.stdout


def test_a_tool_that_hangs_is_ended_and_reported(node: FakeNode) -> None:
    # A child that ignores signals, as a tool waiting for a dead driver has them.
    node.tool("npu-smi", "trap '' TERM INT\n(trap '' TERM; sleep 300) &\nsleep 300\n")
    items = node.items("--timeout", "0.5")
    assert [item["id"] for item in items if item["status"] == "fail"] == ["device.present"]
    assert "did not answer within 0.5 s" in next(i for i in items if i["status"] == "fail")["evidence"]


def test_a_table_cut_off_is_a_warning(node: FakeNode) -> None:
    table = (node.root / "table.txt").read_text()
    node.npu_smi_text(table[: table.index("0000:41")])
    by_id = {item["id"]: item for item in node.items()}
    assert by_id["device.present"]["status"] == "warn"
    assert by_id["device.memory"]["status"] == "na"


def test_without_a_target_nothing_is_compared_and_that_is_said(node: FakeNode) -> None:
    items = {item["id"]: item["status"] for item in node.items(target=False)}
    assert (items["target.complete"], items["target.token_ids"], items["target.yarn"]) == ("warn", "na", "na")


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ({"vllm": "0.25.0"}, "fail", "vLLM 0.25.0 is too old: K3DSparkModel came with 0.27.1"),
        ({"vllm": "0.32.0+cpu"}, "pass", "vLLM 0.32.0+cpu; known there since 0.27.1"),
        ({"sglang": "0.5.23"}, "fail", "no release of SGLang up to now serves this draft"),
        ({"vllm": "0.28.0", "sglang": "0.5.23"}, "warn", "no release of SGLang"),
    ],
)
def test_engines_that_do_not_know_the_draft_are_named(
    node: FakeNode,
    versions: dict[str, str],
    status: str,
    words: str,
) -> None:
    for path in node.packages.glob("vllm*"):
        shutil.rmtree(path)
    for name, version in versions.items():
        node.install(name, version)
    found = [item for item in node.items(device="cpu") if item["id"] == "software.engine"]
    assert [item["status"] for item in found if words in item["evidence"]] == [status]


def test_another_python_is_asked_without_being_imported(node: FakeNode) -> None:
    node.tool("serving-python", f"exec '{sys.executable}' \"$@\"")
    evidence = {item["id"]: item["evidence"] for item in node.items("--python", "serving-python")}
    assert "serving-python" in evidence["software.python"]
    assert node.failed("--python", "no-such-python") == ["software.python"]
    node.tool("broken-python", "echo hello")
    assert node.failed("--python", "broken-python") == ["software.python"]


CUDA = "0, NVIDIA H100 80GB HBM3, 570.86, 81559, 4, 9.0\n1, Tesla T4, 570.86, 15360, [N/A], 7.5\n"


def test_graphics_processors_are_judged_by_their_capability(node: FakeNode) -> None:
    node.tool("nvidia-smi", f"printf '%s' '{CUDA}'")
    items = [item for item in node.items(device="cuda") if item["id"] == "device.bf16"]
    assert [(item["status"], item["evidence"].split(" (")[0]) for item in items] == [
        ("pass", "NVIDIA H100 80GB HBM3"),
        ("fail", "Tesla T4"),
    ]


def remote(host: str, ahead: int = 0, driver: str = "25.5.2", listen: str = "") -> str:
    """What `ssh` prints for a node."""
    return (
        f"cat >/dev/null\nprintf 'time=%s\\nhost={host}\\n' $(($(date +%s) + {ahead})).$(date +%N)\n"
        f"printf 'sees.alpha=192.0.2.1\\nsees.beta=192.0.2.2\\n'\nprintf 'listen={listen}\\n'\n"
        f"printf 'driver.package_version={driver}\\n== npu-smi\\n'\n"
    )


def cluster(node: FakeNode, monkeypatch: pytest.MonkeyPatch, beta: str) -> None:
    real = socket.getaddrinfo
    known = {"alpha": "192.0.2.1", "beta": "192.0.2.2", socket.gethostname(): "192.0.2.9"}

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        return real(known.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    node.tool("ssh", f'case "$*" in\n*" alpha "*) {remote("alpha")} ;;\n*" beta "*) {beta} ;;\nesac\n')


@pytest.mark.parametrize(
    ("beta", "line", "status", "words"),
    [
        (remote("beta"), "nodes.clock", "pass", "s from ours"),
        (remote("beta", ahead=9), "nodes.clock", "warn", "s from ours"),
        (remote("beta", ahead=-3600), "nodes.clock", "fail", "s from ours"),
        (remote("beta", driver="24.1.0"), "nodes.alike", "fail", "alpha: 25.5.2, beta: 24.1.0"),
        (remote("alpha"), "nodes.names", "warn", "more than one node calls itself alpha"),
        (remote("beta", listen="LISTEN 0 128 0.0.0.0:8123 0.0.0.0:*"), "host.ports", "fail", "8123 is taken on beta"),
        ("echo 'Permission denied (publickey).' >&2; exit 255", "nodes.reachable", "fail", "Permission denied"),
    ],
    ids=["right", "ahead", "behind", "driver", "name", "port", "refused"],
)
def test_nodes_are_asked_over_ssh(
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    beta: str,
    line: str,
    status: str,
    words: str,
) -> None:
    cluster(node, monkeypatch, beta)
    items = node.items("--nodes", "alpha,beta", "--ports", "8123")
    troubled = [(item["id"], item["status"]) for item in items if item["status"] == "fail"]
    assert troubled == ([(line, "fail")] if status == "fail" else [])
    assert any(item["id"] == line and item["status"] == status and words in item["evidence"] for item in items)


def test_a_node_name_cannot_become_a_command(node: FakeNode) -> None:
    for name in ("a;reboot", "-oProxyCommand=x", "$(id)", "a b", ","):
        result = node.check("--nodes", name)
        assert result.exit_code == 2, name
        assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["--ports", "x"], ["--ports", "70000"]])
def test_bad_ports_are_bad_input(node: FakeNode, arguments: list[str]) -> None:
    assert node.check(*arguments).exit_code == 2


def test_nothing_to_check_is_bad_input(node: FakeNode, tmp_path: Path) -> None:
    node.draft = tmp_path / "empty"
    assert node.check().exit_code == 2
    node.draft, node.target = node.target.parent / "draft", tmp_path / "nowhere"
    assert node.check().exit_code == 2


def test_the_report_is_one_page_in_the_language_asked_for(node: FakeNode, tmp_path: Path) -> None:
    fill_memory(node)
    page = tmp_path / "report.html"
    result = node.check("--report", str(page), "--lang", "zh")
    assert result.exit_code == 1
    assert "尚不能部署" in result.stdout
    html = page.read_text(encoding="utf-8")
    for words in ('lang="zh"', "显存/内存", "失败", "结束占用显存的进程", "910B4"):
        assert words in html
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_hccs_counters_are_read_where_links_are_measured(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3dspark.model import link_probe

    # No NPU is at hand: what is measured is stood in for, the counters come from the tool.
    result = link_probe.LinkResult("npu:0", "npu:1", "hccl", 25e9, 0.02)
    monkeypatch.setattr(link_probe, "probe_links", lambda *arguments: [result])
    by_id = {item["id"]: item for item in node.items("--links")}
    assert by_id["links.measured"]["status"] == "pass"
    assert "25.00 GB/s" in by_id["links.measured"]["evidence"]
    assert by_id["links.hccs"]["status"] == "warn"
    assert "sent 3.08 GB/s, received 3.14 GB/s now; 1 errors, 2 retries" in by_id["links.hccs"]["evidence"]


def test_operators_become_lines_of_the_checklist(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3dspark.model import op_check

    monkeypatch.setattr(op_check, "MINIATURE_WIDTH", 0)  # the pair's own shapes: Kimi K3's take a minute here
    lines = [item for item in node.items("--ops", device="cpu") if item["id"] == "ops.operator"]
    assert {item["status"] for item in lines} == {"pass"}
    assert {"rms_norm", "mla_absorbed", "markov_gather"} <= {item["subject"] for item in lines}


def test_check_without_measuring_never_imports_torch(node: FakeNode) -> None:
    program = (
        "import sys\nfrom k3dspark.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy'}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "check", str(node.draft), "--target", str(node.target), "--device", "npu"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stderr.strip().splitlines()[-1] == "[]", done.stderr
