"""Requests to a server, and how each way they can fail is told."""

from __future__ import annotations

from typing import Any

import httpx

from k3dspark.errors import BadInput, EngineFault


class Refused(Exception):
    """The server answered with a status from 400 to 499; `text` is what it said."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status, self.text = status, text


class Wire:
    """One server's address and key. Safe for many threads."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float, connections: int) -> None:
        root = url.rstrip("/")
        self.root = root[: -len("/v1")] if root.endswith("/v1") else root
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(headers=headers, timeout=timeout_seconds, limits=limits)

    def get(self, path: str) -> Any:
        """JSON of a GET. Raises `EngineFault`, or `Refused` for a 4xx."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON of a POST. Raises `EngineFault`, or `Refused` for a 4xx."""
        return self._send("POST", path, body)

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, self.root + path, json=body)
            if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
                raise Refused(response.status_code, response.text[:400])
            if response.status_code != 200:
                raise EngineFault(
                    f"{self.root}{path} answered with status {response.status_code}",
                    response.text[:300] or "it said nothing more",
                    "read the server's log; the comparison needs a server that stays up",
                )
            return response.json()
        except httpx.InvalidURL as error:
            raise BadInput(f"{self.root} is no address", str(error), "pass http://HOST:PORT") from error
        except httpx.TimeoutException as error:
            raise EngineFault(
                f"{self.root}{path} did not answer in time",
                f"{type(error).__name__} after {self._client.timeout.read:g} s",
                "raise --timeout, or read the server's log",
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise EngineFault(
                f"{self.root}{path} does not answer",
                str(error) or type(error).__name__,
                "check that the server runs, its address and the firewall",
            ) from error
