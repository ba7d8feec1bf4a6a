"""Figures of the monitor for a real `k3dspark serve` with the embedded pair. Needs a converted pair and a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from k3dspark.diagnosis.observation import from_responses
from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.scrape import Scraper

pytestmark = pytest.mark.integration

PROGRAM = "from k3dspark.cli.main import main; main()"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def complete(base: str, prompt: str) -> str:
    model = json.loads(get(f"{base}/v1/models"))["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 12}).encode()
    request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())


@pytest.fixture
def server(unused_port: int) -> Iterator[str]:
    base = f"http://127.0.0.1:{unused_port}"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "serve", "--port", str(unused_port)])
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                get(f"{base}/ready")
                break
            except OSError:
                assert process.poll() is None
                time.sleep(1)
        yield base
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_figures_equal_those_of_raw_counters_at_both_ends(server: str) -> None:
    monitor = Monitor([f"{server}/metrics"], window_seconds=3600)
    complete(server, "The capital of France is")
    with Scraper() as scraper:
        before = parse(get(f"{server}/metrics"))
        monitor.poll(scraper)
        responses = [complete(server, "def add(a, b):")]
        (model,) = monitor.poll(scraper).models
        after = parse(get(f"{server}/metrics"))

    def added(name: str) -> float:
        first, last = (sum(s.value for s in e.by_name[f"k3dspark:{name}_total"]) for e in (before, after))
        return last - first

    rounds, accepted = added("spec_decode_num_rounds"), added("spec_decode_num_accepted_tokens")
    assert rounds > 0
    assert (model.whole.rounds, model.whole.accepted) == (rounds, accepted)
    assert model.whole.drafted == added("spec_decode_num_draft_tokens")
    assert model.whole.acceptance_length == 1 + accepted / rounds
    assert 1 + sum(model.whole.slots) == pytest.approx(1 + accepted / rounds)
    # The response says the same of the one request that ran.
    (observation,) = from_responses(responses, "responses")
    assert (observation.rounds, observation.accepted) == (rounds, accepted)
