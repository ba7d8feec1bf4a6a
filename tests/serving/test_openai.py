"""The real OpenAI client against the server."""

from __future__ import annotations

import openai
import pytest
from harness import LONG, Running
from test_limits import eventually


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [(model.id, model.owned_by) for model in client.models.list()] == [("target", "k3dspark")]
    assert client.models.retrieve("target").id == "target"


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="target", prompt="Hello", max_tokens=9, temperature=0, n=2, logprobs=1)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 9
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5 + 18
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["rounds"] > 0


def test_a_streamed_chat_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    asked = {
        "model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    scored = [s for c in chunks if c.choices and c.choices[0].logprobs for s in c.choices[0].logprobs.content]
    assert scored == whole.choices[0].logprobs.content


def test_closing_a_stream_frees_its_slot(client: openai.OpenAI, server: Running) -> None:
    body = {"ignore_eos": True}
    stream = client.completions.create(
        model="target", prompt="Once", max_tokens=LONG, temperature=0, stream=True, extra_body=body
    )
    next(iter(stream))
    stream.close()
    assert eventually(lambda: server.service.worker.engine.idle)


def test_errors_arrive_as_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="target", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
