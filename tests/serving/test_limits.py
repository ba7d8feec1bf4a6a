"""What the server refuses, how it says so, and what a client leaves behind."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from harness import LONG, PATIENCE, Running, running

from k3dspark.decoding import FullBlock
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput, EngineFault
from k3dspark.serving.server import EngineSettings
from k3dspark.serving.settings import Limits, Settings, read_keys

ENDLESS = {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True, "temperature": 0}


def eventually(holds: Any, seconds: float = PATIENCE) -> bool:
    """Whether `holds()` becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return False


def raw(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent and nothing has been read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "valid"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"temperature": -0.1}, "temperature", "greater"),
        ({"temperature": 1e30}, "temperature", "less"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", "greater"),
        ({"repetition_penalty": 1e30}, "repetition_penalty", "less"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater"),
        ({"n": 100}, "n", "up to 16"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["x"] * 17}, "stop", "17 stop strings"),
        ({"stop": [""]}, None, "not empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"99999": 1}}, None, "99999"),
        ({"stop_token_ids": [-1]}, None, "-1"),
        ({"prompt": [1, 9999]}, None, "9999"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, None, "empty"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"echo": True, "logprobs": 1}, "echo", "not supported"),
        ({"stream": "yes"}, "stream", "boolean"),
    ],
)
def test_a_wrong_field_is_named(server: Running, fields: dict[str, Any], param: str | None, words: str) -> None:
    status, error = server.refused("/v1/completions", {"prompt": "x"} | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}',
     b'{"prompt": "x", "seed": 1e400}', b"[" * 50_000, b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_malformed_body_is_the_clients_error(server: Running, body: bytes) -> None:
    response = httpx.post(
        server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_paths_and_methods_have_their_status(server: Running) -> None:
    status, error = server.refused("/v1/completions", {"prompt": "x", "model": "gpt-9"})
    assert (status, error["code"]) == (404, "model_not_found")
    assert server.get("/v1/models/gpt-9").status_code == 404
    assert server.get("/v1/models/target").json()["id"] == "target"
    assert server.get("/v2").json()["error"]["message"] == "Not Found"
    assert server.get("/v1/completions").status_code == 405


def test_a_prompt_beyond_the_context_says_which_limit(server: Running) -> None:
    status, error = server.refused("/v1/completions", {"prompt": "x" * 512})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "at most 511 tokens" in error["message"]


def test_every_response_has_its_requests_id(server: Running) -> None:
    assert server.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made_up = server.get("/nothing", headers={"X-Request-Id": "two words"}).headers["x-request-id"]
    assert len(made_up) == 32


def test_limits_of_a_server_are_enforced(pair: ModelPair) -> None:
    limits = Limits(body_bytes=2000, prompt_tokens=20, new_tokens=10, request_seconds=1.0, body_seconds=0.5)
    with running(pair, Settings(limits=limits)) as server:
        assert server.refused("/v1/completions", {"prompt": "x" * 3000})[1]["code"] == "body_too_large"
        chunked = httpx.post(server.url + "/v1/completions", content=iter([b"x" * 1500] * 2), timeout=PATIENCE)
        assert chunked.status_code == 413
        assert server.refused("/v1/completions", {"prompt": "x" * 30})[1]["code"] == "context_length_exceeded"
        assert server.refused("/v1/completions", {"prompt": "x", "max_tokens": 11})[1]["param"] == "max_tokens"
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "xxxx"}]})
        assert answer.status_code == 400, "the template alone has more than 20 tokens"
        slow = socket.create_connection(tuple(server.url.removeprefix("http://").split(":")), timeout=PATIENCE)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(100)
        slow.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_slot(pair: ModelPair, stream: bool) -> None:
    with running(pair, Settings(limits=Limits(request_seconds=0.05))) as server:
        response = server.post("/v1/completions", ENDLESS | {"stream": stream})
        assert response.status_code == (200 if stream else 504)
        assert '"code":"timeout"' in response.text
        assert "[DONE]" not in response.text
        assert eventually(lambda: not server.service.worker.jobs and server.service.worker.engine.idle)
        assert server.metric("request_success_total", finished_reason="abort") == 1


def test_a_full_queue_is_429_with_retry_after(pair: ModelPair) -> None:
    settings = Settings(running=1, limits=Limits(queue=1))
    with running(pair, settings) as server:
        holders = [raw(server, "/v1/completions", ENDLESS) for _ in range(2)]
        assert eventually(lambda: len(server.service.worker.jobs) == 2)
        response = server.post("/v1/completions", ENDLESS)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["code"] == "queue_full"
        for holder in holders:
            holder.close()
        assert eventually(lambda: not server.service.worker.jobs)
        assert server.complete("after", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot_at_once(pair: ModelPair, stream: bool) -> None:
    with running(pair) as server:
        connection = raw(server, "/v1/completions", ENDLESS | {"stream": stream, "n": 3})
        assert eventually(lambda: len(server.service.worker.engine.running) == 3)
        connection.close()
        assert eventually(lambda: server.service.worker.engine.idle)
        assert server.metric("request_success_total", finished_reason="abort") == 3
        assert server.metric("generation_tokens_total") < 3 * LONG
        assert server.service.worker.engine.rows == 0


def test_keys_open_v1_and_nothing_else_needs_them(pair: ModelPair) -> None:
    with running(pair, Settings(api_keys=("first", "sécond"))) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            response = server.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in (b"first", "sécond".encode()):
            assert server.get("/v1/models", headers={b"Authorization": b"Bearer " + key}).status_code == 200
        assert [server.get(path).status_code for path in ("/health", "/ready", "/metrics", "/dashboard")] == [200] * 4


def test_keys_come_from_a_file_and_the_environment(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n alpha \n\nbeta\nalpha\n")
    assert read_keys(file, {"K3DSPARK_API_KEY": "gamma"}) == ("gamma", "alpha", "beta")
    assert read_keys(None, {}) == ()
    file.write_text("# nothing\n")
    with pytest.raises(BadInput, match="holds no key"):
        read_keys(file, {})
    with pytest.raises(BadInput, match="cannot read"):
        read_keys(tmp_path / "missing", {})


def test_cache_rows_are_limited_and_nobody_notices(pair: ModelPair, server: Running) -> None:
    engine = EngineSettings(FullBlock(), exact=True, cache_rows=56)
    prompts = ["alpha", "beta beta", "gamma"]
    fields = {"max_tokens": 24, "ignore_eos": True}
    with running(pair, engine=engine) as limited:
        together = limited.complete(prompts, **fields)
        assert limited.metric("num_preemptions_total") > 0
        status, error = limited.refused("/v1/completions", {"prompt": "x" * 40, "max_tokens": 24})
        assert (status, error["code"]) == (400, "context_length_exceeded")
    expected = [server.complete(prompt, **fields)["choices"][0]["text"] for prompt in prompts]
    assert [choice["text"] for choice in together["choices"]] == expected


def test_a_step_that_fails_ends_its_requests_and_the_server_goes_on(pair: ModelPair) -> None:
    with running(pair) as server:
        engine = server.service.worker.engine
        step, broken = engine.step, True

        def failing() -> Any:
            if broken:
                raise EngineFault("the device is gone", "it fell off", "put it back")
            return step()

        engine.step = failing  # type: ignore[method-assign]
        status, error = server.refused("/v1/completions", {"prompt": "x"})
        assert (status, error["code"]) == (500, "engine_fault")
        assert "the device is gone" in error["message"]
        broken = False
        assert server.complete("x", max_tokens=3)["choices"][0]["finish_reason"] == "length"
        assert server.metric("engine_faults_total") == 1
        assert server.get("/health").status_code == 200


def test_a_dead_engine_is_unhealthy_and_says_so(pair: ModelPair) -> None:
    with running(pair) as server:
        server.service.worker.stop()
        server.service.worker.join(PATIENCE)
        assert [server.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert server.refused("/v1/completions", {"prompt": "x"})[1]["code"] == "engine_stopped"
        assert server.metric("engine_up") == 0
