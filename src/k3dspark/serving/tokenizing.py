"""POST /tokenize and /detokenize, as vLLM has them: for clients that want ids and have no tokenizer of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Response

from k3dspark.errors import BadInput
from k3dspark.serving import errors
from k3dspark.serving.documents import ERRORS, Detokenized, Tokenized
from k3dspark.serving.errors import json_response
from k3dspark.serving.schemas import DetokenizeRequest, TokenizeRequest
from k3dspark.serving.service import Service


def add_tokenizing(app: FastAPI, service: Service) -> None:
    """The two routes."""

    @app.post("/tokenize", response_model=Tokenized, responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise errors.invalid("give either prompt or messages", "prompt")

        def encode() -> list[int]:
            if body.messages is not None:
                return service.tokens.encode_chat([message.turn for message in body.messages])
            return service.tokens.encode(body.prompt or "")

        try:
            ids = await asyncio.get_running_loop().run_in_executor(service.encoders, encode)
        except BadInput as error:
            raise errors.refused(error) from error
        return json_response({"count": len(ids), "max_model_len": service.max_positions, "tokens": ids})

    @app.post("/detokenize", response_model=Detokenized, responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        wrong = next((token for token in body.tokens if not 0 <= token < service.vocab_size), None)
        if wrong is not None:
            raise errors.invalid(f"token id {wrong} is not in the vocabulary", "tokens")
        text: Any = await asyncio.get_running_loop().run_in_executor(service.encoders, service.tokens.text, body.tokens)
        return json_response({"prompt": text})
