"""Servers of vLLM on CPU, started as a person starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3dspark.deploy.launch import is_healthy
from vllm_environment import PYTHON, QUIET

NAME = "target"  # under which the model is served
PATIENCE = 900  # seconds until a server is up: importing vLLM alone takes half a minute


@contextmanager
def vllm_server(target: Path, log: Path, *options: str, more: dict[str, str] | None = None) -> Iterator[str]:
    """A server of `target` that writes to `log`; gives its address. `more` is added to its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", str(128 << 20), "--enable-prompt-tokens-details", *options,
    ]  # fmt: skip
    # Bound by itself, every server would take the same core.
    free = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": ""}
    environment = {**os.environ, **QUIET, **free, **(more or {})}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(120)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if is_healthy(address, NAME):
            return
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
