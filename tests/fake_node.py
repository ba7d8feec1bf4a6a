"""A node made of files: fake tools on PATH, version files below a root, distributions on sys.path."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from k3dspark.checkpoint.synth import synthesise
from k3dspark.cli.main import app

SAMPLES = Path(__file__).parent / "deploy" / "samples"


@dataclass
class FakeNode:
    """An A2 node on which everything is right, until a test plants something."""

    root: Path
    bin: Path
    packages: Path
    draft: Path
    target: Path

    def tool(self, name: str, script: str) -> None:
        """An executable of that name on PATH."""
        path = self.bin / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def npu_smi(self, table: str, board: str = "info-t-board.txt") -> None:
        """`npu-smi` that prints samples."""
        samples = SAMPLES / "npu-smi"
        self.npu_smi_text((samples / table).read_text(encoding="utf-8"), board)

    def npu_smi_text(self, table: str, board: str = "info-t-board.txt") -> None:
        (self.root / "table.txt").write_text(table, encoding="utf-8")
        samples = SAMPLES / "npu-smi"
        self.tool(
            "npu-smi",
            f"case \"$*\" in\n  'info') cat '{self.root}/table.txt' ;;\n"
            f"  'info -t board -i '*) cat '{samples}/{board}' ;;\n"
            f"  'info -t hccs-bw '*) cat '{samples}/info-t-hccs-bw.txt' ;;\n"
            f"  'info -t hccs '*) cat '{samples}/info-t-hccs.txt' ;;\n"
            "  *) echo 'unknown'; exit 1 ;;\nesac\n",
        )

    def version_file(self, sample: str, place: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SAMPLES / "version-files" / sample, path)

    def install(self, name: str, version: str) -> None:
        """A distribution that this Python then finds, in this version."""
        for old in self.packages.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def edit(self, path: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a JSON file of the pair."""
        file = self.draft.parent / path
        mapping = json.loads(file.read_text())
        change(mapping)
        file.write_text(json.dumps(mapping))

    def check(self, *arguments: str, device: str = "npu", target: bool = True) -> Result:
        """`k3dspark check` on this node."""
        given = ["check", str(self.draft), "--device", device, "--root", str(self.root), "--timeout", "30"]
        given += ["--target", str(self.target)] if target else []
        ports = [] if "--ports" in arguments else ["--ports", str(free_port())]
        return CliRunner().invoke(app, [*given, *ports, *arguments], env={"COLUMNS": "200"})

    def items(self, *arguments: str, device: str = "npu", target: bool = True) -> list[dict[str, str]]:
        """The items of `check --json`."""
        result = self.check(*arguments, "--json", device=device, target=target)
        assert result.exit_code in (0, 1), result.output
        report = json.loads(result.stdout)
        assert report["passed"] == (result.exit_code == 0)
        items: list[dict[str, str]] = report["items"]
        return items

    def failed(self, *arguments: str, device: str = "npu", target: bool = True) -> list[str]:
        """The ids of failing items."""
        items = self.items(*arguments, device=device, target=target)
        return [item["id"] for item in items if item["status"] == "fail"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def pristine_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("check") / "pair"
    synthesise(directory, tiny=True)
    return directory


@pytest.fixture
def node(pristine_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """An A2 node with vLLM-Ascend 0.26 and CANN 9.1, and a tiny pair on it."""
    pair = shutil.copytree(pristine_pair, tmp_path / "pair")
    made = FakeNode(tmp_path / "root", tmp_path / "bin", tmp_path / "packages", pair / "draft", pair / "target")
    for directory in (made.root, made.bin, made.packages):
        directory.mkdir()
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{os.defpath}")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.syspath_prepend(str(made.packages))
    made.npu_smi("a2-910b4-32g-25.5.2.txt")
    made.version_file("driver-25.5.2.info", "usr/local/Ascend/driver/version.info")
    made.version_file("firmware-7.8.info", "usr/local/Ascend/firmware/version.info")
    made.version_file("toolkit-9.1.0.info", "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info")
    for name, version in (
        ("vllm", "0.26.0+empty"),
        ("vllm-ascend", "0.26.0rc1"),
        ("torch", "2.10.0"),
        ("torch-npu", "2.10.0.post4"),
    ):
        made.install(name, version)
    return made
