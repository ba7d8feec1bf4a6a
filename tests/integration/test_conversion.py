"""The real conversion of the embedded target, killed and raced. Needs 1.2 GB of disk and about two minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3dspark.checkpoint.cache import is_whole

pytestmark = pytest.mark.integration

CONVERT = "from k3dspark.embedded.target import embedded_target_dir; print(embedded_target_dir())"


def convert(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "K3DSPARK_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def visible(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def test_a_conversion_killed_at_any_moment_is_simply_done_again(tmp_path: Path) -> None:
    process = convert(tmp_path)
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob(".*.tmp-*/*")) and time.monotonic() < deadline:  # its first file is being written
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert visible(tmp_path) == []

    again = convert(tmp_path)
    output, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert is_whole(Path(output.strip()))
    assert list(tmp_path.glob(".*.tmp-*")) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    process = convert(tmp_path)
    assert process.stderr is not None
    process.stderr.readline()  # "Converting …"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_of_two_first_runs_at_once_one_converts_and_the_other_waits(tmp_path: Path) -> None:
    processes = [convert(tmp_path), convert(tmp_path)]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert [status for *_, status in ended] == [0, 0]
    assert len({output for output, *_ in ended}) == 1
    said = "".join(errors for _, errors, _ in ended)
    assert said.count("Converting") == 1
    assert said.count("waiting for it") == 1
