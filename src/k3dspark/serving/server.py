"""A server from its pair to its last response: sockets, signals and logs."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import uvicorn

from k3dspark import __version__
from k3dspark.decoding import Capacity, Engine, Scheduler
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput, EngineFault
from k3dspark.serving.app import build_app
from k3dspark.serving.metrics import Metrics
from k3dspark.serving.service import Service
from k3dspark.serving.settings import Settings
from k3dspark.serving.watch import WatchedScheduler
from k3dspark.serving.worker import Worker

POLL_SECONDS = 0.05
BACKLOG = 2048

log = logging.getLogger("k3dspark.serving")


@dataclass(frozen=True)
class EngineSettings:
    """How requests are decoded. `cache_rows` None: as many as `running` requests can fill."""

    scheduler: Scheduler
    schedule: str = "full"  # its name, for metrics and logs
    exact: bool = False
    prefill_chunk: int = 256
    cache_rows: int | None = None
    draft_candidates: int | None = None
    prefix_rows: int | None = None  # tokens kept for prompts that begin alike; None: none


def build_service(pair: ModelPair, engine_settings: EngineSettings, settings: Settings) -> Service:
    """The service of a pair, its engine not yet running."""
    watched = WatchedScheduler(engine_settings.scheduler)
    engine = Engine(
        pair.target,
        pair.draft,
        watched,
        prefill_chunk=engine_settings.prefill_chunk,
        draft_candidates=engine_settings.draft_candidates,
        exact=engine_settings.exact,
        decode=pair.text,
        capacity=Capacity(settings.running, engine_settings.cache_rows),
        prefix_rows=engine_settings.prefix_rows,
    )
    block = pair.draft.config.block_size if pair.draft is not None else 0
    _check_rows(engine_settings.cache_rows, block)
    info = {
        "version": __version__,
        "schedule": engine_settings.schedule if pair.draft is not None else "none",
        "exact": str(engine_settings.exact).lower(),
        "dtype": str(pair.dtype).removeprefix("torch."),
    }
    device = pair.target.embed(torch.zeros(1, dtype=torch.long)).device
    metrics = Metrics(settings.model_name or pair.name, block, device, info)
    rows = engine_settings.cache_rows or settings.running * pair.target.max_positions
    return Service(pair, Worker(engine, watched, metrics, rows), metrics, settings)


def _check_rows(rows: int | None, block: int) -> None:
    least = block + 2
    if rows is not None and rows < least:
        raise BadInput(
            f"{rows} cache rows",
            f"one round of a single request holds a prompt, an anchor and {block} draft tokens: {least} rows",
            f"pass at least {least}, better some thousands",
        )


def serve(service: Service) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs. Raises `EngineFault` when the address is taken.

    What it logs is written once `set_up_logging` was called.

    The first signal drains: running requests finish, new ones get 503. A second one, or the end of
    `drain_seconds`, cancels what is left.
    """
    listener = _listen(service.settings.host, service.settings.port)
    host, port = listener.getsockname()[:2]
    log.info("%s on http://%s:%d, dashboard at /dashboard", service.model, f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(
        build_app(service),
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=10,
    )
    asyncio.run(_Server(config, service).serve(sockets=[listener]))
    log.info("stopped")


class _Server(uvicorn.Server):
    """uvicorn, with signals that drain instead of ending at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        service = self._service
        if service.draining:
            for job in list(service.worker.jobs):
                service.worker.cancel(job)
            return
        service.draining = True
        service.metrics.draining.set(1)
        log.info("finishing %d running requests; a second signal cancels them", len(service.worker.jobs))
        self._drain = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        jobs, loop = self._service.worker.jobs, asyncio.get_running_loop()
        deadline = loop.time() + self._service.settings.limits.drain_seconds
        while jobs and self._service.worker.alive:
            if loop.time() > deadline:
                for job in list(jobs):
                    self._service.worker.cancel(job)
                deadline = float("inf")
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server((host, address[1]), family=family, backlog=BACKLOG)
    except OSError as error:
        raise EngineFault(
            f"cannot listen on {host}:{port}", error.strerror or str(error), "choose another --port or --host"
        ) from error
    listener.setblocking(False)
    return listener


def set_up_logging(settings: Settings) -> None:
    """Our own lines on standard error; JSON lines carry nothing but what is in them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines() if settings.log_format == "json" else logging.Formatter("%(asctime)s %(message)s")
    )
    for name in ("k3dspark", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "k3dspark" else logging.WARNING)


class _JsonLines(logging.Formatter):
    """Every record as one JSON object; the access log's are objects already."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "k3dspark.serving.access":
            return message
        entry = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": message}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
