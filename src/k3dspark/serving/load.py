"""A load generator for any OpenAI-compatible server: it streams answers and times every piece.

Closed loop: so many clients, each asking again when answered. Open loop: requests arrive at random at a given rate,
whether or not the server keeps up, as they do in life.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from k3dspark.errors import BadInput, EngineFault


@dataclass(frozen=True)
class LoadSettings:
    """What is asked, of whom, and how often. `rate` is requests per second in the open loop; None is the closed loop.

    `requests` are counted after `warm_up`. Ignoring the end of an answer (`ignore_eos`) makes runs comparable; servers
    that do not know the field ignore it.
    """

    url: str
    prompts: tuple[str, ...]
    model: str | None = None
    api_key: str | None = None
    chat: bool = True
    concurrency: int = 1
    rate: float | None = None
    requests: int = 32
    warm_up: int = 2
    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise BadInput("no prompts", "there is nothing to ask", "pass a prompt file that has some")
        for name in ("concurrency", "requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}", "at least one is needed", "pass 1 or more")
        if self.rate is not None and not self.rate > 0:
            raise BadInput(f"the rate is {self.rate}", "no request would ever come", "pass a number above 0")


@dataclass
class Exchange:
    """One request: when it was sent, when text came, and how it ended. Times are of `time.perf_counter`."""

    sent: float
    pieces: list[float] = field(default_factory=list)  # when each event with text came
    ended: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    speculation: dict[str, Any] | None = None
    error: str | None = None

    @property
    def first_token_seconds(self) -> float | None:
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def per_token_seconds(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.new_tokens < 2 or not self.pieces:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.new_tokens - 1)


def find_model(url: str, api_key: str | None = None) -> str:
    """The id of the first model that a server lists. Raises `EngineFault` when it cannot be asked."""
    try:
        answer = httpx.get(f"{_base(url)}/models", headers=_headers(api_key), timeout=30)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        dead = isinstance(error, httpx.ConnectError)
        raise EngineFault(
            f"cannot ask {url} for its models",
            str(error) or type(error).__name__,
            "start the server, or correct --url" if dead else "check --url and --api-key",
        ) from error


def run_load(settings: LoadSettings, on_done: Callable[[Exchange], None] | None = None) -> tuple[list[Exchange], float]:
    """All exchanges after the warm-up, and the seconds they took together. Raises `EngineFault` when all failed."""
    exchanges, seconds = asyncio.run(_run(settings, on_done or (lambda _: None)))
    if all(exchange.error is not None for exchange in exchanges):
        raise EngineFault(
            f"no request to {settings.url} succeeded",
            str(exchanges[0].error),
            "check the server's log, --url, --model and --api-key",
        )
    return exchanges, seconds


async def _run(settings: LoadSettings, on_done: Callable[[Exchange], None]) -> tuple[list[Exchange], float]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=settings.concurrency)
    timeout = httpx.Timeout(settings.timeout_seconds, pool=None)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=_headers(settings.api_key)) as client:
        for number in range(settings.warm_up):
            await ask(client, settings, number)
        started = perf_counter()
        jobs = _open_loop if settings.rate is not None else _closed_loop
        exchanges = [exchange async for exchange in jobs(client, settings, on_done)]
        return exchanges, perf_counter() - started


async def _closed_loop(
    client: httpx.AsyncClient, settings: LoadSettings, on_done: Callable[[Exchange], None]
) -> AsyncIterator[Exchange]:
    numbers = iter(range(settings.requests))
    done: list[Exchange] = []

    async def one_client() -> None:
        for number in numbers:
            done.append(await ask(client, settings, number))
            on_done(done[-1])

    await asyncio.gather(*(one_client() for _ in range(min(settings.concurrency, settings.requests))))
    for exchange in done:
        yield exchange


async def _open_loop(
    client: httpx.AsyncClient, settings: LoadSettings, on_done: Callable[[Exchange], None]
) -> AsyncIterator[Exchange]:
    """Exponential gaps between arrivals: a Poisson process."""
    assert settings.rate is not None
    draw = random.Random(settings.seed)
    asked: list[asyncio.Task[Exchange]] = []
    due = perf_counter()
    for number in range(settings.requests):
        await asyncio.sleep(max(due - perf_counter(), 0))
        task = asyncio.create_task(ask(client, settings, number))
        task.add_done_callback(lambda t: None if t.cancelled() else on_done(t.result()))
        asked.append(task)
        due += draw.expovariate(settings.rate)
    for task in asked:
        yield await task


async def ask(client: httpx.AsyncClient, settings: LoadSettings, number: int) -> Exchange:
    """One streamed request; what goes wrong is in `error`, as it belongs to the measurement."""
    prompt = settings.prompts[number % len(settings.prompts)]
    body: dict[str, Any] = {
        "model": settings.model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if settings.ignore_eos else {}),
        **({"messages": [{"role": "user", "content": prompt}]} if settings.chat else {"prompt": prompt}),
    }
    path = "/chat/completions" if settings.chat else "/completions"
    exchange = Exchange(perf_counter())
    try:
        async with client.stream("POST", _base(settings.url) + path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                exchange.error = f"status {response.status_code}: {text[:300]}"
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        _read(exchange, json.loads(line[5:]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        exchange.error = f"{type(error).__name__}: {error}"
    exchange.ended = perf_counter()
    if exchange.error is None and not exchange.pieces:
        exchange.error = "the stream ended without any text"
    return exchange


def _read(exchange: Exchange, event: dict[str, Any]) -> None:
    if "error" in event:
        exchange.error = str(event["error"])
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        # A reasoning model's thoughts are tokens too.
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            exchange.pieces.append(perf_counter())
    if usage := event.get("usage"):
        exchange.prompt_tokens, exchange.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if metrics := event.get("metrics"):
        exchange.speculation = metrics.get("speculative_decoding")


def _base(url: str) -> str:
    """The address of the API, with or without the /v1 that people leave out."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
