"""Bandwidth between real processes, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k3dspark.checkpoint.synth import synthesise
from k3dspark.errors import BadInput, EngineFault
from k3dspark.model.link_probe import own_rank, probe_links

PROGRAM = "from k3dspark.cli.main import main; main()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_of_this_machine_are_measured_both_ways() -> None:
    results = probe_links("cpu")
    assert [(r.source, r.destination) for r in results] == [("process 0", "process 1"), ("process 1", "process 0")]
    for result in results:
        assert result.backend == "gloo"
        # No loopback is slower than a megabyte or faster than a terabyte a second.
        assert 1e6 < result.bytes_per_second < 1e12
        assert 0 < result.latency_ms < 10_000


def test_two_nodes_that_run_the_same_command_see_the_same_links(tmp_path: Path) -> None:
    synthesise(tmp_path / "pair", tiny=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MASTER_PORT": str(free_port())}
    arguments = ["check", str(tmp_path / "pair/draft"), "--device", "cpu", "--links", "--json"]
    arguments += ["--nodes", "localhost,127.0.0.1", "--ports", str(free_port())]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments, "--node-rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reports = []
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode in (0, 1), errors
        reports.append(json.loads(output))
    links = [[i for i in report["items"] if i["id"] == "links.measured"] for report in reports]
    assert [link["subject"] for link in links[0]] == ["localhost → 127.0.0.1", "127.0.0.1 → localhost"]
    assert [link["evidence"] for link in links[0]] == [link["evidence"] for link in links[1]]
    assert "(gloo)" in links[0][0]["evidence"]


def test_a_node_that_stays_alone_says_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(EngineFault, match=f"did not meet at localhost:{port}"):
        probe_links("cpu", ["localhost", "127.0.0.1"], 0, meeting_seconds=1.0)


def test_a_node_finds_itself_in_the_list_or_asks() -> None:
    own = socket.gethostname()
    assert own_rank(["203.0.113.1", own]) == 1
    assert own_rank(["root@203.0.113.1", "me@localhost"]) == 1
    assert own_rank(["a", "b"], 1) == 1
    for nodes, rank in ((["203.0.113.1", "203.0.113.2"], None), (["localhost", "127.0.0.1"], None), (["a"], 3)):
        with pytest.raises(BadInput, match="--node-rank"):
            own_rank(nodes, rank)
