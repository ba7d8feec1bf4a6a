"""Errors in the shape that OpenAI clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from k3dspark.errors import BadInput, K3DSparkError


class ApiError(Exception):
    """A refusal that a client gets to see, with its HTTP status."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None, retry: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code, self.retry = (
            status, message, kind, param, code, retry
        )  # fmt: skip

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry)} if self.retry else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in UTF-8; a lone surrogate, which a client may have sent, is escaped instead of failing."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text.encode("utf-8", "backslashreplace")
    return Response(body, status, dict(headers or {}), media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, "invalid_request_error", param, code)


def refused(error: BadInput) -> ApiError:
    """400 from an error of the engine's own checks."""
    long = "context holds" in error.why or "cache rows" in error.what
    return invalid(str(error), code="context_length_exceeded" if long else None)


def fault(error: K3DSparkError | None) -> ApiError:
    """500: the engine failed; the client's request was in order."""
    message = str(error) if error is not None else "the engine failed; the server's log says why"
    return ApiError(500, message, "server_error", code="engine_fault")


def busy(waiting: int) -> ApiError:
    return ApiError(429, f"{waiting} requests are waiting already; try again later", "rate_limit_error",
                    code="queue_full", retry=1)  # fmt: skip


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down and takes no new requests", "service_unavailable",
                    code="shutting_down", retry=5)  # fmt: skip


def stopped() -> ApiError:
    return ApiError(503, "the engine has stopped", "service_unavailable", code="engine_stopped", retry=30)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} s", "timeout_error", code="timeout")
