"""Launching with real processes: health, deadlines, failures told in words, and nothing left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3dspark.checkpoint.published import tiny_config
from k3dspark.deploy.launch import counters
from k3dspark.deploy.launch_files import write_launch_files
from k3dspark.deploy.options import DraftFacts, LaunchWish

FAKE = Path(__file__).parents[1] / "fake_engine.py"
FACTS = DraftFacts.of(tiny_config())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_address() -> str | None:
    """An address of this machine that is not loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


class Lab:
    """A launch directory whose engine is the fake one."""

    def __init__(self, path: Path) -> None:
        self.path, self.pids = path, path / "pids"
        draft = path / "draft"
        draft.mkdir()
        (draft / "config.json").write_text("{}")
        (draft / "model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
        self.python = path / "python"
        self.python.write_text(
            f'#!/bin/sh\n[ "$2" = k3dspark.vllm_plugin ] && exec {sys.executable} "$@"\n'
            f'exec {sys.executable} {FAKE} "$@"\n'
        )
        self.python.chmod(0o755)
        self.port = free_port()

    def write(self, **wish: object) -> Path:
        device = "cpu" if wish.get("nodes", 1) == 1 else "cuda"
        full = LaunchWish("vllm", str(self.path / "draft"), str(self.path), device=device, port=self.port, context=512,
                          rpc_port=free_port(), python=str(self.python), **wish)  # type: ignore[arg-type]  # fmt: skip
        return write_launch_files(FACTS, full, self.path / "plan").path

    def start(self, *options: str, behaviour: str = "healthy", path: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "FAKE_ENGINE": behaviour, "FAKE_ENGINE_PIDS": str(self.pids)}
        if path:
            environment["PATH"] = f"{path}:{environment['PATH']}"
        command = [
            sys.executable,
            "-c",
            "from k3dspark.cli.main import main; main()",
            "launch",
            str(self.path / "plan"),
        ]
        return subprocess.Popen(
            [*command, "--grace", "2", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def running(self) -> list[int]:
        """Processes of the engine that still live."""
        pids = [int(line) for line in self.pids.read_text().split()] if self.pids.exists() else []
        return [pid for pid in pids if _alive(pid)]

    def wait_for_workers(self, count: int = 2) -> None:
        deadline = time.monotonic() + 60
        while len(self.running()) < count:
            assert time.monotonic() < deadline, "the engine did not start"
            time.sleep(0.05)

    def wait_for_none(self) -> None:
        deadline = time.monotonic() + 30
        while self.running():
            assert time.monotonic() < deadline, f"still running: {self.running()}"
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for pid in made.running():  # only what this test's own engine wrote down
        os.kill(pid, signal.SIGKILL)


def test_a_rehearsal_starts_speculates_once_and_leaves_nothing_running(lab: Lab) -> None:
    lab.write()
    output, errors = (process := lab.start("--until-healthy")).communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "healthy after" in errors
    assert "speculative: 70 drafted, 35 accepted" in errors
    assert "0 | ready" in output
    assert lab.running() == []
    assert "ready" in (lab.path / "plan" / "logs" / "node-0.log").read_text()


def test_an_engine_that_drafts_nothing_fails_the_rehearsal(lab: Lab) -> None:
    lab.write()
    _, errors = (process := lab.start("--until-healthy", behaviour="plain")).communicate(timeout=120)
    assert process.returncode == 3
    assert "drafted nothing" in errors
    assert lab.running() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_a_healthy_engine_with_its_workers(lab: Lab, number: signal.Signals) -> None:
    lab.write()
    process = lab.start("--json")
    assert process.stdout is not None
    events = (json.loads(line) for line in process.stdout)
    assert next(event for event in events if event["event"] == "healthy")["text"].endswith(str(lab.port))
    process.send_signal(number)
    kinds = [event["event"] for event in events]
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert kinds[-1] == "stopped"
    assert lab.running() == []


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(lab: Lab) -> None:
    lab.write()
    process = lab.start(behaviour="stubborn")
    lab.wait_for_workers()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert lab.running() == []
    assert time.monotonic() - began >= 2, "killed before the grace of 2 s was over"


def test_a_killed_launcher_leaves_no_orphan(lab: Lab) -> None:
    lab.write()
    process = lab.start("--quiet")
    lab.wait_for_workers()
    process.kill()
    process.communicate(timeout=30)
    lab.wait_for_none()


def test_stopping_before_it_is_healthy_says_so(lab: Lab) -> None:
    lab.write()
    process = lab.start(behaviour="silent")
    lab.wait_for_workers()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert lab.running() == []


def test_the_deadline_ends_an_engine_that_never_answers(lab: Lab) -> None:
    lab.write()
    _, errors = (process := lab.start("--deadline", "3", behaviour="silent")).communicate(timeout=120)
    assert process.returncode == 3
    assert "not healthy within 3 s" in errors
    assert lab.running() == []


def test_a_stop_before_the_engine_has_its_process_group_is_not_lost(lab: Lab) -> None:
    lab.write()
    slow = lab.path / "bin"
    slow.mkdir()
    (slow / "setsid").write_text(f'#!/bin/sh\nsleep 3\nexec {shutil.which("setsid")} "$@"\n')
    (slow / "setsid").chmod(0o755)
    _, errors = (process := lab.start("--deadline", "1", behaviour="silent", path=str(slow))).communicate(timeout=120)
    assert process.returncode == 3
    assert "not healthy within 1 s" in errors
    assert lab.running() == []


@pytest.mark.parametrize("parts", [[b"sto", b"p\n"], [b"s", b"t", b"op\n"]], ids=["two", "three"])
def test_a_word_that_comes_in_parts_is_heard(lab: Lab, parts: list[bytes]) -> None:
    plan = lab.write()
    environment = {**os.environ, "FAKE_ENGINE": "silent", "FAKE_ENGINE_PIDS": str(lab.pids)}
    with subprocess.Popen(["bash", plan / "supervise.sh", "0", "1"], stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        lab.wait_for_workers()
        for part in parts:
            process.stdin.write(part)
            process.stdin.flush()
            time.sleep(1.3)  # longer than one read of the supervisor waits
        assert process.wait(60) == 0
    assert lab.running() == []


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB", "memory ran out"),
        ("Model architectures ['K3DSparkModel'] are not supported for now.", "too old"),
        ("error: unrecognized arguments: --headless", "does not have an option of the plan"),
        ("[ERROR] HCCL(4242,python3): connect timeout", "NPUs did not reach each other"),
    ],
    ids=["memory", "architecture", "option", "hccl"],
)
def test_a_known_failure_is_told_in_words(lab: Lab, words: str, meaning: str) -> None:
    lab.write()
    _, errors = (process := lab.start(behaviour=f"die:{words}")).communicate(timeout=120)
    assert process.returncode == 3
    assert meaning in errors.split("error:")[1]
    assert lab.running() == []


def test_a_taken_port_is_found_before_anything_starts(lab: Lab) -> None:
    lab.write()
    with socket.socket() as other:
        other.bind(("0.0.0.0", lab.port))
        other.listen()
        _, errors = (process := lab.start()).communicate(timeout=60)
    assert process.returncode == 3
    assert f"port {lab.port} is taken" in errors
    assert not lab.pids.exists()


def test_a_folder_that_is_no_plan_is_bad_usage(lab: Lab) -> None:
    (lab.path / "plan").mkdir()
    _, errors = (process := lab.start()).communicate(timeout=60)
    assert process.returncode == 2
    assert "k3dspark plan" in errors


SSH = """#!/usr/bin/env bash
# Plays ssh: drops the options, and runs the command as the host beta, which lives in a directory of its own.
while [[ $1 == -o ]]; do shift 2; done
echo "$1" >> {log}
shift
cd {home} && PATH={bin}:$PATH exec bash -c "$*"
"""


@pytest.fixture
def two_nodes(lab: Lab) -> Path:
    """A plan of this machine and of beta, which only the fake ssh reaches; the path of the fake programs."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    remote, programs = lab.path / "beta", lab.path / "bin"
    remote.mkdir()
    programs.mkdir()
    for name, text in (
        ("ssh", SSH.format(log=lab.path / "ssh.log", home=remote, bin=programs)),
        ("getent", '#!/bin/sh\ncase $2 in beta) echo "10.9.8.7 beta";; *) exec /usr/bin/getent "$@";; esac\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    lab.write(nodes=2, hosts=(address, "beta"), interface="lo", home=str(remote / "launch"))
    return programs


def test_two_nodes_are_started_over_ssh_and_both_stopped(lab: Lab, two_nodes: Path) -> None:
    _, errors = (process := lab.start("--until-healthy", path=str(two_nodes))).communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (lab.path / "beta" / "launch" / "plan.json").exists()
    assert (lab.path / "ssh.log").read_text().split() == ["beta", "beta"]
    assert len(lab.pids.read_text().split()) == 4
    assert lab.running() == []


def test_a_killed_launcher_stops_the_far_node_as_well(lab: Lab, two_nodes: Path) -> None:
    process = lab.start("--quiet", path=str(two_nodes))
    lab.wait_for_workers(4)
    process.kill()
    process.communicate(timeout=30)
    lab.wait_for_none()


def test_a_node_that_ssh_does_not_reach_is_named(lab: Lab, two_nodes: Path) -> None:
    (two_nodes / "ssh").write_text('#!/bin/sh\necho "ssh: connect to host beta: No route to host" >&2\nexit 255\n')
    _, errors = (process := lab.start(path=str(two_nodes))).communicate(timeout=120)
    assert process.returncode == 3
    assert "No route to host" in errors
    assert "ssh beta true" in errors
    assert lab.running() == []


def test_a_worker_node_is_started_alone_with_its_number(lab: Lab, two_nodes: Path) -> None:
    process = lab.start("--node", "1", "--quiet", path=str(two_nodes))
    lab.wait_for_workers()
    assert not (lab.path / "ssh.log").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert lab.running() == []


def test_counters_are_summed_over_replicas_and_engines_named_apart() -> None:
    page = ('vllm:spec_decode_num_draft_tokens_total{engine="0"} 70.0\nvllm:spec_decode_num_draft_tokens_total'
            '{engine="1"} 7.0\nvllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0\n'
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 9.0\n")  # fmt: skip
    assert counters(page) == (77.0, 30.0)
    assert counters('sglang:spec_accept_length{tp_rank="0"} 3.5\n') == (3.5, 2.5)
