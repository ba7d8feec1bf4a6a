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
from monitoring.test_live import serving
from scrapes import vllm

pytestmark = pytest.mark.integration

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


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: apt-get install prometheus)")
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
