"""Fetching /metrics: addresses as people write them, time limits, and faults in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import httpx

from k3dspark.errors import BadInput
from k3dspark.monitoring.exposition import LARGEST_BYTES, Exposition, parse

# Read by servers that can give either; the text format is what every one of them can.
_ACCEPT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
_MOST_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Scrape:
    """One answer, or the fault in its place. `time` is when it came, in seconds since the epoch."""

    source: str
    time: float
    exposition: Exposition | None
    fault: str = ""
    seconds: float = 0.0


def address(text: str) -> str:
    """`host:8000`, `http://host:8000` and `http://host:8000/v1` as the URL of their metrics; other paths stay.

    Raises `BadInput` for what no engine can be reached at.
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise BadInput(f"{text} is no address", str(error), "write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadInput(f"{text} is no address", "an engine is reached over http or https", "write http://HOST:PORT")
    path = parts.path.rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, "/metrics" if path in ("", "/v1") else path, parts.query, ""))


class Scraper:
    """Fetches sources side by side, so that a dead one delays nothing but itself. Close it, or use it with `with`."""

    def __init__(self, timeout_seconds: float = 5.0, headers: dict[str, str] | None = None) -> None:
        # Metrics live on the cluster's own network: a proxy meant for the internet must not get in between.
        self._client = httpx.Client(
            timeout=timeout_seconds, headers={"Accept": _ACCEPT, **(headers or {})}, trust_env=False
        )
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="scrape")

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def scrape(self, sources: Sequence[str]) -> list[Scrape]:
        """One scrape of each source (URLs from `address`), in their order. Never raises: faults are in the result."""
        return list(self._pool.map(self._one, sources))

    def version(self, source: str) -> str:
        """What vLLM's GET /version says beside this source; empty when there is no such answer."""
        parts = urlsplit(source)
        try:
            answer = self._client.get(urlunsplit((parts.scheme, parts.netloc, "/version", "", ""))).json()
        except (httpx.HTTPError, ValueError):
            return ""
        return str(answer.get("version", ""))[:60] if isinstance(answer, dict) else ""

    def _one(self, source: str) -> Scrape:
        started = time.monotonic()

        def failed(fault: str) -> Scrape:
            return Scrape(source, time.time(), None, fault, time.monotonic() - started)

        try:
            with self._client.stream("GET", source) as answer:
                if answer.status_code != 200:
                    return failed(_status(answer.status_code, answer.headers.get("location", "")))
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > LARGEST_BYTES:
                        return failed(f"the answer is larger than {LARGEST_BYTES >> 20} MiB")
                kind = answer.headers.get("content-type", "")
            exposition = parse(body.decode("utf-8", "replace"), kind, source)
        except httpx.TimeoutException:
            return failed(f"no answer in {time.monotonic() - started:.1f} s")
        except httpx.HTTPError as error:
            return failed(f"{type(error).__name__}: {error}"[:200])
        except BadInput as error:
            return failed(f"no Prometheus text: {error.why}"[:200])
        return Scrape(source, time.time(), exposition, "", time.monotonic() - started)


def _status(status: int, location: str) -> str:
    if status == 404:
        return "HTTP 404: no metrics there (SGLang serves them only with --enable-metrics)"
    if status in (401, 403):
        return f"HTTP {status}: it asks for a key; pass --header 'Authorization: Bearer …'"
    if location:
        return f"HTTP {status}: sent on to {location[:100]}; give that address"
    return f"HTTP {status}"
