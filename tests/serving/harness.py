"""A real server on a real socket in a thread, over a tiny random pair, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from k3dspark.decoding import FullBlock
from k3dspark.embedded.pair import ModelPair, load_pair
from k3dspark.serving.app import build_app
from k3dspark.serving.server import EngineSettings, build_service
from k3dspark.serving.service import Service
from k3dspark.serving.settings import Settings
from tiny_models import write_draft, write_target

LONG = 300  # tokens that take many rounds to decode
PATIENCE = 600  # seconds; a busy machine must not fail a test


def tiny_pair(directory: Path, **target: Any) -> ModelPair:
    return load_pair(write_target(directory / "target", **target), write_draft(directory / "draft"), dtype="float32")


@dataclass(frozen=True)
class Running:
    """A server under test."""

    service: Service
    url: str

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE, **more)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        response = self.post(path, body, **more)
        return response.status_code, response.json()["error"]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for family in self.service.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == f"k3dspark:{name}" and labels.items() <= sample.labels.items():
                    total += sample.value
        return total


@contextmanager
def running(
    pair: ModelPair, settings: Settings | None = None, engine: EngineSettings | None = None
) -> Iterator[Running]:
    """Serve `pair` on a free port until the block ends."""
    service = build_service(pair, engine or EngineSettings(FullBlock(), exact=True), settings or Settings())
    config = uvicorn.Config(build_app(service), host="127.0.0.1", port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(service, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
