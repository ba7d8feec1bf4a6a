"""Foreign programs and nodes: what hangs, fails or babbles gives an outcome, never an exception or a wait."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.deploy.command import OUTPUT_BYTES, run
from k3dspark.deploy.host import parse_ports, read_disk, read_processor
from k3dspark.deploy.nodes import _parse_answer, parse_nodes, read_nodes
from k3dspark.errors import BadInput


def test_a_program_that_is_missing_fails_or_ends_well() -> None:
    assert run(["no-such-program-anywhere"], 5).outcome == "missing"
    failed = run(["sh", "-c", "echo words >&2; exit 3"], 30)
    assert (failed.outcome, failed.status, failed.said) == ("failed", 3, "words")
    assert run(["cat"], 30, "given").stdout == "given"


def test_a_program_that_hangs_is_killed_with_its_children() -> None:
    start = time.monotonic()
    hung = run(["sh", "-c", "echo first; sleep 300 & sleep 300"], 0.5)
    assert (hung.outcome, hung.stdout) == ("hung", "first\n")
    assert time.monotonic() - start < 30


def test_output_without_end_is_cut() -> None:
    done = run([sys.executable, "-c", "print('x' * 3_000_000)"], 60)
    assert len(done.stdout) == OUTPUT_BYTES


def test_the_processor_is_read_below_a_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Kunpeng\nFeatures\t: fp asimd bf16\n\nprocessor\t: 1\n"
    )
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:    400 kB\n")
    cpu = read_processor(tmp_path)
    assert (cpu.name, cpu.cores, cpu.bf16) == ("Kunpeng", 2, True)
    assert (cpu.memory_total_bytes, cpu.memory_available_bytes) == (1_024_000, 409_600)
    assert read_processor(tmp_path / "nowhere").memory_total_bytes is None


def test_the_disk_of_a_directory_to_come_is_its_parents(tmp_path: Path) -> None:
    assert read_disk(tmp_path / "a/b/c").total_bytes == read_disk(tmp_path).total_bytes


def test_lists_of_ports_and_nodes() -> None:
    assert parse_ports("8000, 29500,8000") == (8000, 29500)
    assert parse_nodes("root@a, 192.0.2.7,fe80::1") == ("root@a", "192.0.2.7", "fe80::1")
    for text in ("0", "65536", "a", "-1"):
        with pytest.raises(BadInput):
            parse_ports(text)


def test_this_node_is_asked_by_the_same_script_without_ssh() -> None:
    (node,) = read_nodes(["localhost"], [], 60)
    assert node.problem == ""
    assert node.host_name
    assert abs(node.offset_seconds) <= node.uncertainty_seconds + 1
    assert [name for name, _ in node.sees] == ["localhost"]


@given(st.lists(st.text(max_size=40) | st.sampled_from(["time=12", "time=", "listen=LISTEN 0 0 [::]:80 *:*"])))
def test_any_answer_of_a_node_is_read_or_refused(lines: list[str]) -> None:
    node = _parse_answer("a", (), "\n".join(lines), 10.0, 11.0, [80])
    assert node.problem or node.offset_seconds == node.offset_seconds
