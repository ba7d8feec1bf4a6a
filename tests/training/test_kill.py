"""A run killed without warning, and the run that takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import killable_run
from k3dspark.training.pipeline import train


def kill_in_the_middle(target: Path, shards: Path, out: Path, processes: int) -> None:
    """Start a run, wait until it stands between two checkpoints, and send SIGKILL to the process that was started."""
    command = [sys.executable, killable_run.__file__, str(target), str(shards), str(out), str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "holding\n"
            run.kill()
            assert run.wait() == -signal.SIGKILL
            assert nobody_left(run.pid), "worker processes outlive the killed run"
        finally:
            if not nobody_left(run.pid, 0):
                os.killpg(run.pid, signal.SIGKILL)


def nobody_left(group: int, seconds: float = 120) -> bool:
    """Whether every process of the session ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_started_again_ends_with_the_parameters_of_one_that_was_not(
    deep_target: Path, shards: Path, tmp_path: Path, processes: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(killable_run.job(deep_target, shards, whole, processes), killable_run.quiet)
    kill_in_the_middle(deep_target, shards, parts, processes)
    with safe_open(parts / "state.safetensors", framework="pt") as handle:
        assert int(handle.metadata()["step"]) == 16
    train(killable_run.job(deep_target, shards, parts, processes), killable_run.quiet)
    ours, theirs = (load_file(out / "state.safetensors") for out in (whole, parts))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
