"""The monitor against real HTTP servers whose counters move."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from k3dspark.cli.main import app
from k3dspark.errors import BadInput
from k3dspark.monitoring.exporter import SnapshotCollector, listen_address, serve
from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.scrape import Scraper, address
from scrapes import sample, vllm


@contextmanager
def serving(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """An HTTP server that answers GET path with (status, body); gives HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Engine:
    """A vLLM that does ten rounds between any two scrapes: each accepts slot 1, half of them slot 2."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.broken = False

    def __call__(self, path: str) -> tuple[int, str]:
        if path == "/version":
            return 200, '{"version": "0.29.0"}'
        if self.broken or path != "/metrics":
            return 503, "overloaded"
        self.scrapes += 1
        done = 10 * self.scrapes
        return 200, vllm(
            done, [done, done / 2], more={"generation_tokens_total": 2.5 * done, "num_requests_running": 1}
        )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("http://host:8000/v1/", "http://host:8000/metrics"),
        ("https://host/npu/metrics", "https://host/npu/metrics"),
        ("[::1]:9", "http://[::1]:9/metrics"),
    ],
)
def test_addresses_are_taken_as_people_write_them(written: str, meant: str) -> None:
    assert address(written) == meant


@pytest.mark.parametrize("written", ["ftp://host", "http://", "host:port", "host:99999"])
def test_what_is_no_address_is_refused(written: str) -> None:
    with pytest.raises(BadInput, match="no address"):
        address(written)


def test_figures_of_a_moving_server_are_those_of_its_counters() -> None:
    with serving(Engine()) as host, Scraper() as scraper:
        monitor = Monitor([address(host)])
        monitor.poll(scraper)
        snapshot = monitor.poll(scraper)
    (model,) = snapshot.models
    assert (model.whole.rounds, model.whole.accepted, model.whole.slots) == (10, 15, (1.0, 0.5))
    (source,) = snapshot.sources
    assert (source.up, source.kind, source.version) == (True, "vLLM", "0.29.0")
    assert "past the end" in source.note


def test_a_scrape_that_fails_is_shown_and_the_others_go_on() -> None:
    sick, well = Engine(), Engine()
    with serving(sick) as one, serving(well) as two, Scraper() as scraper:
        monitor = Monitor([address(one), address(two)])
        monitor.poll(scraper)
        sick.broken = True
        monitor.poll(scraper)
        snapshot = monitor.poll(scraper)
        sick.broken = False
        healed = monitor.poll(scraper)
    assert [(s.up, s.fault, s.failures) for s in snapshot.sources] == [(False, "HTTP 503", 2), (True, "", 0)]
    assert snapshot.models[0].whole.rounds == 20
    # Nothing is lost: the counters went on while nobody looked.
    assert healed.models[0].whole.rounds == 10 + 30


def test_a_source_that_never_answers_delays_only_itself() -> None:
    def slow(_: str) -> tuple[int, str]:
        time.sleep(3)
        return 200, ""

    with serving(slow) as one, serving(Engine()) as two, Scraper(timeout_seconds=1.0) as scraper:
        slow_one, quick = scraper.scrape([address(one), address(two)])
    assert "no answer" in slow_one.fault
    assert quick.exposition is not None
    assert quick.seconds < 1.0


def test_a_page_in_place_of_metrics_is_no_figure() -> None:
    with serving(lambda _: (200, "<html>log in</html>")) as host, Scraper() as scraper:
        (scrape,) = scraper.scrape([address(host)])
    assert scrape.exposition is None
    assert "no Prometheus text" in scrape.fault


def test_an_unknown_exporter_is_named_as_such() -> None:
    with serving(lambda _: (200, "node_load1 3\n")) as host, Scraper() as scraper:
        (source,) = Monitor([address(host)]).poll(scraper).sources
    assert (source.up, source.kind) == (True, "")
    assert "known" in source.fault


def test_once_prints_one_object_of_the_window() -> None:
    with serving(Engine()) as engine, serving(lambda _: (200, sample("npu-exporter"))) as npu:
        arguments = ["monitor", engine, npu, "--once", "--json", "--interval", "0.2", "--plain-step-ms", "20",
                     "--round-ms", "40"]  # fmt: skip
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    (model,) = answer["models"]
    assert (model["acceptance_length"], model["rounds"], model["slots"]) == (2.5, 10, [1.0, 0.5])
    assert model["break_even"]["length"] == pytest.approx(2.0)
    assert model["break_even"]["speed_up"] == pytest.approx(1.25)
    assert [device["utilisation"] for device in answer["devices"]] == [0.87, 0.0, None]
    assert "vllm:inter_token_latency_seconds" in answer["sources"][0]["missing"]


def test_the_table_shows_what_the_object_says() -> None:
    with serving(Engine()) as engine:
        done = CliRunner().invoke(
            app, ["monitor", "watch", engine, "--once", "--interval", "0.2"], env={"COLUMNS": "200"}
        )
    assert done.exit_code == 0, done.output
    for part in ("2.500", "10 rounds", "missing: vllm:inter_token_latency_seconds", "give --plain URL"):
        assert part in done.stdout


def test_without_a_terminal_each_interval_is_one_line() -> None:
    with serving(Engine()) as engine:
        done = CliRunner().invoke(app, ["monitor", engine, "--interval", "0.2", "--duration", "0.4"])
    assert done.exit_code == 0, done.output
    first, second, third = done.stdout.splitlines()
    assert "length –" in first
    assert "length 2.50" in second
    assert "slots 1.00 0.50" in third


def test_nothing_to_scrape_is_a_fault_of_status_3() -> None:
    with serving(lambda _: (404, "")) as gone:
        command = [sys.executable, "-m", "k3dspark.cli.main", "monitor", gone, "--once", "--interval", "0.1"]
        program = "from k3dspark.cli.main import main; import sys; sys.argv = sys.argv[1:]; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, "k3dspark", *command[3:]], capture_output=True, text=True, check=False
        )
    assert done.returncode == 3
    assert "--enable-metrics" in done.stderr


def test_no_address_is_bad_usage() -> None:
    done = CliRunner().invoke(app, ["monitor", "watch"])
    assert done.exit_code == 2


def test_everything_is_served_again_in_one_naming() -> None:
    engine = Engine()
    with serving(engine) as host, serving(lambda _: (200, sample("dcgm"))) as dcgm, Scraper() as scraper:
        monitor = Monitor([address(host), address(dcgm)])
        collector = SnapshotCollector(monitor)
        server, thread = serve(collector, "127.0.0.1", 0)
        try:
            for _ in range(3):
                collector.update(monitor.poll(scraper))
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                exposition = parse(answer.read().decode())
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)

    def value(name: str, **labels: str) -> float:
        (found,) = [s for s in exposition.by_name[name] if labels.items() <= s.labels.items()]
        return found.value

    assert value("dspark_rounds_total", model="m", rank="0") == 20
    assert value("dspark_accepted_per_slot_total", slot="2") == 10
    assert value("dspark_acceptance_length", model="m") == 2.5
    assert value("dspark_device_utilisation_ratio", device="1") == 0.41
    assert value("dspark_source_up", kind="vLLM") == 1
    assert value("dspark_family_missing", family="vllm:inter_token_latency_seconds") == 1


def test_listening_is_for_this_machine_unless_a_host_is_named() -> None:
    assert listen_address("9108") == ("127.0.0.1", 9108)
    assert listen_address("0.0.0.0:9108") == ("0.0.0.0", 9108)
    assert listen_address("[::]:1") == ("::", 1)
    with pytest.raises(BadInput):
        listen_address("here")
