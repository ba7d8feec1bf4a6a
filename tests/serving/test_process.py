"""`k3dspark serve` as a program: signals, logs and exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from harness import PATIENCE

from tiny_models import write_pair

MANY = 450  # tokens that take a while, and nearly all that the tiny target's context holds
PROGRAM = [sys.executable, "-c", "from k3dspark.cli.main import main; main()"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_pair(root)


def metrics(url: str) -> str:
    return httpx.get(url + "/metrics", timeout=PATIENCE).text


@contextmanager
def program(directories: tuple[Path, Path], *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and the lines it has logged so far."""
    target, draft = (str(directory) for directory in directories)
    command = [*PROGRAM, "serve", "--port", "0", "--target", target, "--draft", draft,
               "--dtype", "float32", *options]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    address: Queue[str] = Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "dashboard at" in line:
                address.put("http://" + line.split("http://")[1].split(",")[0])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        url = address.get(timeout=PATIENCE)
        while True:  # listening; the engine's thread starts a moment later
            try:
                if httpx.get(url + "/ready", timeout=PATIENCE).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield process, url, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_0(directories: tuple[Path, Path]) -> None:
    with program(directories, "--log-format", "json", "--max-running", "3") as (process, url, lines):
        asked = {"prompt": "SECRET", "max_tokens": MANY, "temperature": 0, "ignore_eos": True}
        answers: list[httpx.Response] = []
        clients = [
            threading.Thread(
                target=lambda: answers.append(httpx.post(url + "/v1/completions", json=asked, timeout=PATIENCE))
            )
            for _ in range(4)
        ]
        for client in clients:
            client.start()
        while 'k3dspark:num_requests_running{engine="0",model_name="target"} 3' not in metrics(url):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        while (
            late := httpx.post(url + "/v1/completions", json=asked | {"max_tokens": 1}, timeout=PATIENCE)
        ).status_code == 200:
            time.sleep(0.01)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert int(late.headers["retry-after"]) > 0
        assert httpx.get(url + "/ready", timeout=PATIENCE).status_code == 503
        assert httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
        for client in clients:
            client.join()
        assert [a.json()["usage"]["completion_tokens"] for a in answers] == [MANY] * 4, "the waiting one too"
        assert process.wait(PATIENCE) == 0
    entries = [json.loads(line) for line in lines]
    done = [
        e
        for e in entries
        if e.get("status") == 200 and e["path"] == "/v1/completions" and e["completion_tokens"] == MANY
    ]
    assert len({e["request_id"] for e in done}) == 4
    assert not any("SECRET" in line for line in lines), "prompts are logged only when asked for"


def test_a_second_signal_cancels_and_still_exits_0(directories: tuple[Path, Path]) -> None:
    with program(directories, "--log-prompts") as (process, url, lines):
        asked = {"prompt": "PLEASE\nLOG", "max_tokens": MANY, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=asked, timeout=PATIENCE) as stream:
            pieces = stream.iter_lines()
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            rest = "".join(pieces)
        assert '"code":"engine_fault"' in rest
        assert process.wait(PATIENCE) == 0
    assert any('prompt="PLEASE\\nLOG"' in line for line in lines)


def test_after_sigkill_the_same_command_serves_again_on_the_same_port(directories: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    asked = {"prompt": "AGAIN", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = []
    for _ in range(2):
        with program(directories, "--port", port) as (process, url, _):
            texts.append(httpx.post(url + "/v1/completions", json=asked, timeout=PATIENCE).json()["choices"])
            endless = asked | {"max_tokens": 400, "stream": True}
            with httpx.stream("POST", url + "/v1/completions", json=endless, timeout=PATIENCE) as stream:
                pieces = stream.iter_lines()
                next(pieces)
                process.kill()
                with pytest.raises(httpx.HTTPError):
                    list(pieces)
            assert process.wait(PATIENCE) == -signal.SIGKILL
    assert texts[0] == texts[1]


def test_it_says_what_it_does_before_it_listens(directories: tuple[Path, Path]) -> None:
    with program(directories, "--log-format", "json", "--no-prefix-cache") as (_, _, lines):
        said = [json.loads(line)["message"] for line in lines[:2]]
    assert said == ["loading the models", "loaded target and its draft"]


def test_a_port_in_use_is_a_fault_with_a_remedy(directories: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        target, draft = (str(directory) for directory in directories)
        done = subprocess.run(
            [*PROGRAM, "serve", "--port", str(port), "--target", target, "--draft", draft],
            capture_output=True, text=True, check=False, timeout=PATIENCE, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
    assert done.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--no-draft", "--schedule", "cost"], "--no-draft"),
        (["--target", "."], "no draft for ."),
        (["--target", "x"], "there is no directory x"),
        (["--threshold", "0.5"], "--schedule threshold"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--api-key-file", "/nonexistent"], "cannot read the key file"),
        (["--max-seconds", "nan"], "--max-seconds nan"),
        (["--drain-seconds", "inf"], "--drain-seconds inf"),
        (["--max-running", "1000000"], "--max-running"),
        (["--top-k", str(2**31)], "top_k is 2147483648"),
    ],
)
def test_contradicting_options_are_refused_before_anything_loads(options: list[str], words: str) -> None:
    from typer.testing import CliRunner

    from k3dspark.cli.main import app

    done: Any = CliRunner().invoke(app, ["serve", *options])
    assert done.exit_code == 2
    assert words in done.output
