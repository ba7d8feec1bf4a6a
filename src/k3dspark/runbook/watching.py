"""The last step's engine: the one at an address, or our own server over the pair for as long as it is watched."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx
import uvicorn

from k3dspark.decoding import FullBlock
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import EngineFault
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.scrape import Scraper, address
from k3dspark.runbook.asked import Asked
from k3dspark.serving.app import build_app
from k3dspark.serving.server import EngineSettings, build_service
from k3dspark.serving.settings import Settings

INTERVAL: Final = 10.0  # seconds that somebody else's engine is watched
QUESTIONS: Final = 4
PATIENCE: Final = 600.0


@dataclass(frozen=True)
class Watched:
    """What the engine's metrics said. None: it does not say, or nothing happened."""

    engine: str
    model: str
    length: float | None
    tokens_per_second: float | None
    utilisation: float | None
    missing: tuple[str, ...]


def watched(asked: Asked, pair: Callable[[], ModelPair]) -> Watched:
    """Scrape twice, and read what happened between. Raises `EngineFault` when the engine does not answer."""
    if asked.url is not None:
        return _between(asked.url, lambda: time.sleep(INTERVAL))
    opened = pair()
    prompts = [_ids(opened, text) for text in asked.texts()[:QUESTIONS]]
    with _serving(opened) as url:
        return _between(url, lambda: _ask(url, prompts, asked.new_tokens))


def _between(url: str, meanwhile: Callable[[], None]) -> Watched:
    place = address(url)
    monitor = Monitor([place], PATIENCE)
    with Scraper() as scraper:
        monitor.poll(scraper)
        meanwhile()
        snapshot = monitor.poll(scraper)
    if not snapshot.models:
        faults = "; ".join(f"{source.source}: {source.fault}" for source in snapshot.sources)
        raise EngineFault("no engine answers", faults, "check that the engine runs, its port and the firewall")
    model = snapshot.models[0]
    source = snapshot.sources[0]
    used = [device.utilisation for device in snapshot.devices if device.utilisation is not None]
    return Watched(
        source.kind,
        model.model,
        model.whole.acceptance_length,
        model.whole.tokens_per_second,
        max(used) if used else None,
        tuple(source.missing),
    )


def _ids(pair: ModelPair, text: str) -> list[int]:
    return pair.chat_ids(text) if pair.tokenizer.chat_template else pair.raw_ids(text)


def _ask(url: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    for prompt in prompts:
        body = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        if response.status_code != 200:
            raise EngineFault("our own server refused a request", response.text[:200], "report this bug")


@contextmanager
def _serving(pair: ModelPair) -> Iterator[str]:
    """Our server over a pair on a free port of this machine, until the block ends."""
    service = build_service(pair, EngineSettings(FullBlock()), Settings())
    config = uvicorn.Config(build_app(service), host="127.0.0.1", port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise EngineFault("our own server did not start", "its thread ended", "run k3dspark serve to see why")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
