"""The checklist's words, and its figures for Kimi K3."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

import k3dspark.deploy
from k3dspark.checkpoint.inspection import inspect_checkpoint
from k3dspark.checkpoint.synth import synthesise
from k3dspark.deploy import wording_en, wording_zh
from k3dspark.deploy.accelerators import NpuFacts, parse_gpus
from k3dspark.deploy.checklist import judge
from k3dspark.deploy.command import Ran
from k3dspark.deploy.facts import Facts
from k3dspark.deploy.host import Disk, HostName, Port, Processor
from k3dspark.deploy.items import Item, word
from k3dspark.deploy.npu_smi import Chip, NpuInfo
from k3dspark.deploy.python_env import PythonFacts

SOURCES = [*Path(k3dspark.deploy.__file__).parent.glob("*check*.py")]


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_say_the_same_things() -> None:
    for name in ("MESSAGES", "TITLES", "SECTIONS", "STATUSES", "LABELS"):
        english, chinese = getattr(wording_en, name), getattr(wording_zh, name)
        assert list(english) == list(chinese), name
    for key, pair in wording_en.MESSAGES.items():
        other = wording_zh.MESSAGES[key]
        assert [placeholders(text) for text in pair] == [placeholders(text) for text in other], key
        assert bool(pair[1]) == bool(other[1]), key


def test_every_message_and_line_that_the_checks_name_exists() -> None:
    named, lines = set(), set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Item":
                constants = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
                lines |= {constants[0]} - {None}
                named |= {constants[2]} - {None} if len(constants) > 2 else set()
    assert named <= set(wording_en.MESSAGES)
    assert lines <= set(wording_en.TITLES)
    assert len(named) > 60


def test_values_from_outside_cannot_be_taken_for_placeholders() -> None:
    item = Item("device.driver", "pass", "device.driver", {"version": "{path}", "path": "{0}{x!r}"})
    assert word(item, "en").evidence == "{path} ({0}{x!r})"


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("k3") / "draft"
    synthesise(directory, sparse=True)
    return directory


def facts(draft: Path, chips: list[Chip]) -> Facts:
    return Facts(
        device="npu",
        draft=inspect_checkpoint(draft),
        target=None,
        target_problem=None,
        target_given=False,
        processor=Processor("", 1, False, None, None),
        host=HostName("here", ("192.0.2.1",)),
        disk=Disk("/", 1 << 40, 1 << 40),
        shared_memory=None,
        ports=(Port(8000, "free"),),
        python=PythonFacts("", "3.11"),
        npus=NpuFacts(Ran("npu-smi", "ok", 0), NpuInfo("25.5.2", tuple(chips)), {}),
    )


@pytest.mark.parametrize(
    ("gigabytes", "used", "status"),
    [(8, 0, "fail"), (16, 100, "warn"), (32, 2922, "pass"), (64, 3159, "pass"), (64, 60000, "fail")],
)
def test_kimi_k3_needs_16_gb_and_32_for_long_contexts(k3: Path, gigabytes: int, used: int, status: str) -> None:
    chip = Chip(0, 0, "910B3", "OK", memory_used_mb=used, memory_total_mb=gigabytes * 1024, family="A2")
    item = next(item for item in judge(facts(k3, [chip])) if item.id == "device.memory")
    assert item.status == status
    assert (item.values["weights"], item.values["per_token"]) == ("9.47", 5760)


def test_the_fullest_chip_decides_about_memory(k3: Path) -> None:
    chips = [
        Chip(0, n, "910B3", "OK", memory_used_mb=used, memory_total_mb=65536, family="A2")
        for n, used in enumerate((100, 64000))
    ]
    item = next(item for item in judge(facts(k3, chips)) if item.id == "device.memory")
    assert (item.status, item.values["name"]) == ("fail", "NPU 0 chip 1")


def test_a_chip_whose_name_tells_nothing_is_a_warning_that_names_the_test(k3: Path) -> None:
    items = judge(facts(k3, [Chip(0, 0, "Ascend910", "OK")]))
    item = next(item for item in items if item.id == "device.bf16")
    assert item.status == "warn"
    assert "check --ops" in word(item, "en").remedy


def test_lines_of_another_shape_are_no_graphics_processors() -> None:
    assert parse_gpus("No devices were found\n,,,\n0, X, 1, 2\n") == ()
    assert parse_gpus("0, X, 570, [N/A], 4, [N/A]")[0].bf16 is None
