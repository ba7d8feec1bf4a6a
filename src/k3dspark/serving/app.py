"""The HTTP application: routes, their errors in OpenAI's shape, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from k3dspark import __version__
from k3dspark.serving import chat, completions, errors
from k3dspark.serving.dashboard import dashboard_page
from k3dspark.serving.documents import ERRORS, ChatCompletion, Completion, Health, Models
from k3dspark.serving.errors import ApiError, json_response
from k3dspark.serving.generation import Generation
from k3dspark.serving.guard import BoundedBody, Keys, RequestLog
from k3dspark.serving.heap import keep_trimmed
from k3dspark.serving.schemas import ChatRequest, CompletionRequest
from k3dspark.serving.service import Service
from k3dspark.serving.stream import EventStream, while_connected
from k3dspark.serving.tokenizing import add_tokenizing

JOIN_SECONDS = 30.0  # for the engine to end the step it is in


def build_app(service: Service) -> ASGIApp:
    """The whole server as one ASGI application; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start(asyncio.get_running_loop())
        trimming = asyncio.create_task(keep_trimmed())
        yield
        trimming.cancel()
        service.worker.stop()
        await asyncio.to_thread(service.worker.join, JOIN_SECONDS)

    # No pages of documentation: theirs load scripts from elsewhere. /openapi.json stays.
    app = FastAPI(title="k3dspark", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_answers(app, service)
    add_tokenizing(app, service)
    _add_operations(app, service)
    _add_errors(app)
    guarded: ASGIApp = BoundedBody(app, service.settings.limits)
    guarded = Keys(guarded, service.settings.api_keys)
    return RequestLog(guarded, service.metrics, service.settings)


def _add_answers(app: FastAPI, service: Service) -> None:
    seconds = service.settings.limits.request_seconds

    @app.get("/v1/models", response_model=Models, responses=ERRORS)
    async def models() -> Response:
        model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "k3dspark",
                 "max_model_len": service.max_positions}  # fmt: skip
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{model:path}", response_model=Models, responses=ERRORS)
    async def model(model: str) -> Response:
        if model != service.model:
            raise ApiError(404, f"the model {model!r} is not served here", "invalid_request_error", "model",
                           "model_not_found")  # fmt: skip
        return json_response({"id": service.model, "object": "model", "created": service.created,
                              "owned_by": "k3dspark", "max_model_len": service.max_positions})  # fmt: skip

    @app.post("/v1/completions", response_model=Completion, responses=ERRORS)
    async def completions_endpoint(request: Request, body: CompletionRequest) -> Response:
        if service.settings.log_prompts:
            request.scope["k3dspark.prompt"] = str(body.prompt)
        generation = await completions.begin(service, body)
        if body.stream:
            stream = completions.chunks(service, body, generation)
            return _Logged(request, generation, stream, seconds)
        await _finish(request, generation, seconds)
        return json_response(completions.whole(service, generation))

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
    async def chat_endpoint(request: Request, body: ChatRequest) -> Response:
        if service.settings.log_prompts:
            request.scope["k3dspark.prompt"] = " ".join(message.text for message in body.messages)
        generation = await chat.begin(service, body)
        if body.stream:
            return _Logged(request, generation, chat.chunks(service, body, generation), seconds)
        await _finish(request, generation, seconds)
        return json_response(chat.whole(service, generation))


async def _finish(request: Request, generation: Generation, seconds: float) -> None:
    try:
        await while_connected(request.receive, generation.finish(), seconds)
    finally:
        generation.cancel()
        note(request, generation)


class _Logged(EventStream):
    """An event stream whose figures reach the request's log line."""

    def __init__(
        self, request: Request, generation: Generation, chunks: AsyncIterator[dict[str, Any]], seconds: float
    ) -> None:
        super().__init__(chunks, generation, seconds)
        self._request = request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            note(self._request, self._generation)
            if "k3dspark.error" in scope:
                self._request.scope["k3dspark.error"] = scope["k3dspark.error"]


def note(request: Request, generation: Generation) -> None:
    """Leave the figures of a generation where the log line finds them."""
    request.scope["k3dspark.prompt_tokens"] = generation.prompt_tokens
    request.scope["k3dspark.completion_tokens"] = generation.completion_tokens
    stats = generation.metrics()["speculative_decoding"]
    request.scope["k3dspark.acceptance_length"] = round(stats["mean_acceptance_length"], 3)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=Health, responses=ERRORS)
    async def health() -> Response:
        """200 while the engine's thread lives: restart the server when it does not."""
        if not service.worker.alive:
            raise errors.stopped()
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=Health, responses=ERRORS)
    async def ready() -> Response:
        """200 while new requests are taken: send none when it does not."""
        service.check_open()
        return json_response({"status": "ok"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/dashboard", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def dashboard() -> Response:
        return Response(
            dashboard_page(),
            media_type="text/html; charset=utf-8",
            headers={
                "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                "connect-src 'self'; img-src data:",
                "Cache-Control": "no-cache",
            },
        )


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        request.scope["k3dspark.error"] = error.message
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        # A union of types reports each of them; the field is what the reader needs.
        param = ".".join(place[:1]) or None
        message = f"{'.'.join(place)}: {first['msg']}" if place else f"the body: {first['msg']}"
        return await refuse(request, errors.invalid(message, param))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        response = ApiError(error.status_code, str(error.detail), kind).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, _: ClientDisconnect) -> Response:
        request.scope["k3dspark.error"] = "client gone"
        return Response(status_code=499)  # nobody reads it; the log and the metrics do

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server hit a bug; its log says where", "server_error").response()
