"""Directories built once: whole or not at all, by one process of several, again when damaged."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3dspark.checkpoint.cache import MANIFEST, built_once, cache_root, is_whole
from k3dspark.errors import BadInput


def silent(_: str) -> None:
    pass


def write_model(directory: Path) -> None:
    (directory / "weights.bin").write_bytes(b"w" * 1000)
    (directory / "config.json").write_text("{}")


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if ".tmp-" in path.name)


def test_a_built_directory_holds_its_files_and_a_manifest_of_their_sizes(tmp_path: Path) -> None:
    directory = built_once(tmp_path / "model", write_model, 0, silent)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", MANIFEST, "weights.bin"]
    assert is_whole(directory)


def test_a_whole_directory_is_not_built_again(tmp_path: Path) -> None:
    built_once(tmp_path / "model", write_model, 0, silent)

    def never(_: Path) -> None:
        raise AssertionError("built twice")

    built_once(tmp_path / "model", never, 0, silent)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "garbled manifest", "empty manifest"])
def test_a_damaged_directory_is_built_again(tmp_path: Path, damage: str) -> None:
    directory = built_once(tmp_path / "model", write_model, 0, silent)
    match damage:
        case "truncated":
            (directory / "weights.bin").write_bytes(b"w" * 999)
        case "missing":
            (directory / "config.json").unlink()
        case "no manifest":
            (directory / MANIFEST).unlink()
        case "garbled manifest":
            (directory / MANIFEST).write_bytes(b"\xff{")
        case "empty manifest":
            (directory / MANIFEST).write_text("{}")
    assert not is_whole(directory)
    built_once(directory, write_model, 0, silent)
    assert is_whole(directory)
    assert (directory / "weights.bin").stat().st_size == 1000
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, fault: type[BaseException]) -> None:
    def breaks_off(directory: Path) -> None:
        write_model(directory)
        raise fault

    with pytest.raises(fault):
        built_once(tmp_path / "model", breaks_off, 0, silent)
    assert not (tmp_path / "model").exists()
    assert leftovers(tmp_path) == []


BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from k3dspark.checkpoint.cache import built_once

def build(directory):
    (directory / "weights.bin").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)

built_once(Path(sys.argv[1]), build, 0, print)
"""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_SLOWLY, str(tmp_path / "model")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "model").exists()
    assert len(leftovers(tmp_path)) == 1
    built_once(tmp_path / "model", write_model, 0, silent)
    assert is_whole(tmp_path / "model")
    assert leftovers(tmp_path) == []


def _count_builds(directory: Path) -> None:
    def build(temporary: Path) -> None:
        with (directory.parent / "builds").open("a") as file:
            file.write("x")
        time.sleep(0.5)
        write_model(temporary)

    built_once(directory, build, 0, silent)
    assert is_whole(directory)


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count_builds, args=(tmp_path / "model",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_too_little_disk_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="K3DSPARK_CACHE"):
        built_once(tmp_path / "model", write_model, 1 << 60, silent)
    assert not (tmp_path / "model").exists()
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(BadInput, match="cannot write to the cache directory"):
        built_once(tmp_path / "file" / "model", write_model, 0, silent)


def test_the_cache_follows_its_own_variable_then_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSPARK_CACHE", "/data/models")
    assert cache_root() == Path("/data/models")
    monkeypatch.delenv("K3DSPARK_CACHE")
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert cache_root() == Path("/xdg/k3dspark")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
        assert cache_root() == Path(os.path.expanduser("~/.cache/k3dspark"))
