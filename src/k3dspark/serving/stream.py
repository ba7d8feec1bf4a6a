"""Answers that end early when their client has gone: whole ones and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k3dspark.serving.errors import ApiError, timed_out
from k3dspark.serving.generation import Generation

LAST_WORDS_SECONDS = 2.0  # a client that does not read must not hold the server any longer


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run `work` to its end. Raises `ClientDisconnect` once the client is gone, `ApiError` 504 after `seconds`."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        done, _ = await asyncio.wait({working, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        raise ClientDisconnect if gone in done else timed_out(seconds)
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of `chunks`, ending with [DONE], or with the error that ended them.

    However it ends, what is still running in the engine is cancelled.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], generation: Generation, seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._generation, self._seconds = chunks, generation, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await while_connected(receive, self._write(send), self._seconds)
            except ApiError as error:
                scope["k3dspark.error"] = error.message
                await _say(send, _event(error.body()))
            except (ClientDisconnect, OSError):
                scope["k3dspark.error"] = "client gone"
            else:
                return
            await _say(send, b"", more=False)
        finally:
            self._generation.cancel()

    async def _write(self, send: Send) -> None:
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _say(send: Send, body: bytes, more: bool = True) -> None:
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(
            send({"type": "http.response.body", "body": body, "more_body": more}), LAST_WORDS_SECONDS
        )


def _event(content: dict[str, Any]) -> bytes:
    # json escapes line breaks, so an event is always one line.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "backslashreplace") + b"\n\n"
