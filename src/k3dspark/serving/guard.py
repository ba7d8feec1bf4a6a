"""What every request passes before an endpoint sees it: an id, a log line, a key, a body of bounded size and time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
from collections.abc import Sequence
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3dspark.serving.errors import ApiError
from k3dspark.serving.metrics import Metrics
from k3dspark.serving.settings import Limits, Settings

log = logging.getLogger("k3dspark.serving.access")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PATHS = re.compile(r"/(?:v1/(?:models|completions|chat/completions)|health|ready|metrics|dashboard)")


class RequestLog:
    """Gives every request an id, counts its response, and logs one line when it is over."""

    def __init__(self, app: ASGIApp, metrics: Metrics, settings: Settings) -> None:
        self.app, self.metrics, self.settings = app, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid4().hex
        scope["k3dspark.request_id"] = request_id
        started, status = perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            # Other paths under one name: a scanner must not fill the metrics.
            self.metrics.response(path if _PATHS.fullmatch(path) else "other", status)
            self._line(scope, request_id, status, perf_counter() - started)

    def _line(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        entry: dict[str, Any] = {
            "time": round(time(), 3),
            "request_id": request_id,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **{key.removeprefix("k3dspark."): scope[key] for key in _LOGGED if key in scope},
        }
        if self.settings.log_format == "json":
            log.info(json.dumps(entry))
        else:
            log.info(" ".join(f"{key}={value if _plain(value) else json.dumps(value)}" for key, value in entry.items()))


_LOGGED = tuple(
    f"k3dspark.{key}" for key in ("prompt_tokens", "completion_tokens", "acceptance_length", "error", "prompt")
)


def _plain(value: object) -> bool:
    """Whether a value needs no quotes; a path with a line break in it must not look like another log line."""
    return isinstance(value, int | float) or re.fullmatch(r"[\x21-\x7e]+", str(value)) is not None


class Keys:
    """Refuses /v1, /tokenize and /detokenize without one of the API keys. Each is compared, in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/v1", "/tokenize", "/detokenize"))
        if guarded and self._digests and not self._known(scope):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", "authentication_error",
                             code="invalid_api_key")  # fmt: skip
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # headers come decoded so, whatever the client meant
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _digest(key: bytes) -> bytes:
    # Of equal length whatever the key, so that a comparison tells nothing about it.
    return hashlib.sha256(key).digest()


class BoundedBody:
    """Receives a body whole, up to the limits of size and time, before the endpoint runs."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self.limits.body_seconds)
        except TimeoutError:
            error = ApiError(408, f"the body took longer than {self.limits.body_seconds:g} s", "timeout_error")
            await error.response()(scope, receive, send)
            return
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        if body is None:
            return  # the client left before it had said anything

        replayed = False

        async def receive_again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self.limits.body_bytes:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self.limits.body_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self.limits.body_bytes} bytes", "invalid_request_error",
            code="body_too_large",
        )  # fmt: skip
