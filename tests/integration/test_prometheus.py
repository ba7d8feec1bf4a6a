"""A real Prometheus (Debian: prometheus) with the exported files finds the figures of the counters."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from k3dspark.monitoring.export import Deployment, write
from k3dspark.monitoring.exposition import parse
from monitoring.test_live import serving
from scrapes import vllm
from serving.harness import running, tiny_pair
from vllm_environment import interpreter, needs_vllm, write_pair
from vllm_servers import vllm_server

pytestmark = pytest.mark.integration
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian: apt-get install prometheus)"
)

SLOTS = (0.8, 0.6, 0.45, 0.34, 0.26, 0.2, 0.15)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """Prometheus on the configuration in `folder`, at a second's pace; gives its address."""
    for path in folder.glob("*.yml"):
        path.write_text(path.read_text().replace('"15s"', '"1s"').replace('"30s"', '"1s"'))
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": "prometheus.yml", "storage.tsdb.path": "data", "web.listen-address": address}
    process = subprocess.Popen(
        ["prometheus", *(f"--{name}={value}" for name, value in options.items())],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except OSError:
        return []


def wait_for(address: str, expression: str, seconds: float = 90) -> list[dict[str, Any]]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := query(address, expression):
            return found
        time.sleep(1)
    raise AssertionError(f"{expression} has no value after {seconds} s")


@needs_prometheus
def test_prometheus_with_the_exported_files_finds_the_acceptance_of_the_counters(tmp_path: Path) -> None:
    started = time.monotonic()

    def engine(_: str) -> tuple[int, str]:
        rounds = 1000 + 50 * (time.monotonic() - started)
        kept = [share * rounds for share in SLOTS]
        more = {"generation_tokens_total": rounds + sum(kept), "num_requests_running": 3.0}
        return 200, vllm(rounds, kept, more=more)

    with serving(engine) as host:
        write(tmp_path, Deployment(service="k3", engines=(host,), expected=3.0))
        with prometheus(tmp_path) as address:
            (length,) = wait_for(address, 'dspark:acceptance_length:5m{service="k3"}')
            conditional = wait_for(address, 'dspark:slot_conditional:5m{position="1"}')
            alerts = query(address, 'ALERTS{alertstate="firing"}')
    assert length["metric"]["model_name"] == "m"
    assert float(length["value"][1]) == pytest.approx(1 + sum(SLOTS))
    assert float(conditional[0]["value"][1]) == pytest.approx(0.75)
    assert alerts == []


@needs_prometheus
def test_prometheus_finds_the_figures_of_our_server(tmp_path: Path) -> None:
    with running(tiny_pair(tmp_path / "pair")) as ours:
        _check_figures(ours.url, "k3dspark", "rounds", tmp_path / "prometheus")


@needs_prometheus
@needs_vllm
def test_prometheus_finds_the_figures_of_vllm(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "pair")
    speculative = json.dumps({"method": "dspark", "model": str(draft), "num_speculative_tokens": 7})
    options = ("--speculative-config", speculative)
    with vllm_server(target, tmp_path / "log", *options, more=interpreter()) as theirs:
        _check_figures(theirs, "vllm", "drafts", tmp_path / "prometheus")


def _check_figures(server: str, prefix: str, rounds_are: str, folder: Path) -> None:
    """Prometheus holds the server's own counters, and its recorded length is theirs at both ends of a run."""

    def counters() -> dict[str, float]:
        with urllib.request.urlopen(f"{server}/metrics", timeout=60) as answer:
            by_name = parse(answer.read().decode()).by_name
        return {what: sum(s.value for s in by_name[family(name)]) for what, name in names.items()}

    def family(name: str) -> str:
        return f"{prefix}:spec_decode_num_{name}_total"

    names = {"rounds": rounds_are, "accepted": "accepted_tokens", "drafted": "draft_tokens",
             "slots": "accepted_tokens_per_pos"}  # fmt: skip
    _complete(server, 8)  # series that appear with the first request are there before the first scrape
    write(folder, Deployment(service="k3", engines=(server.removeprefix("http://"),)))
    before = counters()
    with prometheus(folder) as address:
        for name in names.values():
            wait_for(address, family(name))
        for _ in range(3):
            _complete(server, 32)
        after = counters()
        added = {what: after[what] - before[what] for what in names}
        for what, name in names.items():
            (held,) = wait_for(address, f"sum({family(name)}) == {after[what]}")
            assert float(held["value"][1]) == after[what]
        assert added["slots"] == added["accepted"]
        length = 1 + added["accepted"] / added["rounds"]
        wait_for(address, f"abs(dspark:acceptance_length:5m - {length}) < 1e-9")
        wait_for(address, f"abs(dspark:acceptance_rate:5m - {added['accepted'] / added['drafted']}) < 1e-9")
        assert query(address, 'count(up{job="dspark-engines"} == 1)')


def _complete(server: str, tokens: int) -> None:
    with urllib.request.urlopen(f"{server}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": "1, 2, 1, 2, 1,", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=900).close()
