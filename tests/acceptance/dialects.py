"""HTTP servers that speak as vLLM and SGLang document it, over a scripted law; neither runs on every machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from acceptance.scripted import VOCABULARY, Scripted
from k3dspark.acceptance.asking import Answer, Question, Sampling

Reply = tuple[int, Any]


@contextmanager
def speaking(
    side: Scripted, owner: str = "vllm", *, refuses: tuple[str, ...] = (), ids: bool = True, logprobs: bool = True,
    broken_after: int | None = None, tokenizes: bool = True,
) -> Iterator[str]:  # fmt: skip
    """A server's address. It answers 400 to the fields it `refuses`, and 500 after so many answers."""
    served = 0

    def reply(path: str, body: dict[str, Any]) -> Reply:
        nonlocal served
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "owned_by": owner, "max_model_len": side.context}]}
        if path == "/tokenize" and tokenizes:
            return 200, {"tokens": list(side.prompt(Question(text=body["prompt"])))}
        if unknown := [field for field in refuses if field in body]:
            return 400, {"error": {"message": f"extra fields are not permitted: {unknown[0]}"}}
        served += 1
        if broken_after is not None and served > broken_after:
            return 500, {"error": {"message": "the engine is dead"}}
        if path == "/generate" and owner == "sglang":
            return 200, _native(side, body)
        if path == "/v1/completions" and owner != "sglang":
            (answer,) = side.ask([_question(body, body["prompt"])])
            return 200, _openai(answer, body, {"text": answer.text}, ids, logprobs and "logprobs" in body, chat=False)
        if path == "/v1/chat/completions":
            (answer,) = side.ask([_question(body, None)])
            message = {"message": {"role": "assistant", "content": answer.text}}
            return 200, _openai(answer, body, message, ids, logprobs and bool(body.get("logprobs")), chat=True)
        return 404, {"error": {"message": f"no {path}"}}

    with listening(reply) as url:
        yield url


@contextmanager
def listening(reply: Callable[[str, dict[str, Any]], Reply]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*reply(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*reply(self.path, body))

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _question(body: dict[str, Any], prompt: Any) -> Question:
    top = body.get("top_logprobs") or (body.get("logprobs") if prompt is not None else None) or 0
    return Question(
        token_ids=tuple(prompt) if isinstance(prompt, list) else None,
        text=prompt if isinstance(prompt, str) else None,
        messages=tuple(body["messages"]) if prompt is None else None,
        max_tokens=body["max_tokens"],
        stop=tuple(body.get("stop") or ()),
        ignore_end=bool(body.get("ignore_eos")),
        sampling=Sampling(body["temperature"], seed=body.get("seed")),
        top=int(top),
    )


def _name(token: int, body: dict[str, Any]) -> str:
    return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else f"{token:02}"


def _openai(
    answer: Answer, body: dict[str, Any], says: dict[str, Any], ids: bool, logprobs: bool, *, chat: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, **says, "finish_reason": answer.finish, "logprobs": None}
    names = [_name(token, body) for token in answer.token_ids]
    if logprobs and chat:
        choice["logprobs"] = {
            "content": [
                {"token": name, "logprob": s.chosen,
                 "top_logprobs": [{"token": _name(t, body), "logprob": value} for t, value in s.best]}
                for name, s in zip(names, answer.scores, strict=True)
            ]
        }  # fmt: skip
    elif logprobs:
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": [s.chosen for s in answer.scores],
            "top_logprobs": [{_name(t, body): value for t, value in s.best} for s in answer.scores],
        }
    top: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": answer.prompt_tokens}}
    if ids and body.get("return_token_ids"):
        choice["token_ids"] = list(answer.token_ids)
        (top if chat else choice)["prompt_token_ids"] = list(answer.prompt_ids or ())
    return top


def _native(side: Scripted, body: dict[str, Any]) -> dict[str, Any]:
    asked = body["sampling_params"]
    question = Question(
        token_ids=tuple(body["input_ids"]),
        max_tokens=asked["max_new_tokens"],
        stop=tuple(asked.get("stop") or ()),
        ignore_end=asked.get("ignore_eos", False),
        sampling=Sampling(asked["temperature"]),
        top=body["top_logprobs_num"],
    )
    (answer,) = side.ask([question])
    return {
        "text": answer.text,
        "output_ids": list(answer.token_ids),
        "meta_info": {
            "finish_reason": {"type": answer.finish},
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": 0,
            "output_token_logprobs": [
                [s.chosen, token, None] for token, s in zip(answer.token_ids, answer.scores, strict=True)
            ],
            "output_top_logprobs": [[[value, token, None] for token, value in s.best] for s in answer.scores],
        },
    }


class NameCodec:
    """The tokenizer of the scripted law: every token is its number in two digits."""

    origin = "two digits"

    def encode(self, text: str) -> list[int]:
        return [int(text[i : i + 2]) for i in range(0, len(text), 2)]

    def decode(self, token_ids: Any) -> str:
        return "".join(f"{token:02}" for token in token_ids)

    def id_of(self, name: str) -> int | None:
        return int(name) if name.isdigit() and int(name) < VOCABULARY else None
