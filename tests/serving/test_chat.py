"""POST /v1/chat/completions on a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import Running, running

from k3dspark.embedded.pair import ModelPair, load_pair
from tiny_models import write_draft, write_target

ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}


def chat(server: Running, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", ASK | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_chat_is_the_completion_of_its_template(server: Running, pair: ModelPair) -> None:
    answer = chat(server, max_tokens=20)
    text = server.complete(pair.chat_ids("hi"), max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["object"] == "chat.completion"


def test_system_and_developer_messages_and_text_parts_are_one_thing(server: Running) -> None:
    asked = []
    for role, content in (
        ("system", "Be brief"),
        ("developer", [{"type": "text", "text": t} for t in ("Be ", "brief")]),
    ):
        messages = [{"role": role, "content": content}, *ASK["messages"]]  # type: ignore[misc]
        asked.append(chat(server, messages=messages, max_tokens=9)["choices"][0]["message"]["content"])
    assert asked[0] == asked[1]


def test_both_names_of_the_token_limit_work_and_the_new_one_wins(server: Running) -> None:
    assert chat(server, max_tokens=7)["usage"]["completion_tokens"] == 7
    assert chat(server, max_completion_tokens=9, max_tokens=7)["usage"]["completion_tokens"] == 9


def test_a_stream_begins_with_the_role_and_adds_up(server: Running) -> None:
    whole = chat(server, max_tokens=16, n=2)
    response = server.post("/v1/chat/completions", ASK | {"max_tokens": 16, "n": 2, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and line != "data: [DONE]"]
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == whole["choices"][index]["message"]["content"]


def test_logprobs_name_tokens_and_their_bytes(server: Running) -> None:
    answer = chat(server, max_tokens=16, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    data = bytes(byte for entry in content for byte in entry["bytes"])
    assert data.decode("utf-8", "replace") == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    status, error = server.refused("/v1/chat/completions", ASK | fields)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_a_model_without_template_says_so(tmp_path: Any) -> None:
    pair = load_pair(write_target(tmp_path / "t", chat_template=None), write_draft(tmp_path / "d"), dtype="float32")
    with running(pair) as server:
        status, error = server.refused("/v1/chat/completions", ASK)
    assert status == 400
    assert "no chat template" in error["message"]


def test_a_template_that_refuses_is_the_clients_error(tmp_path: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    pair = load_pair(write_target(tmp_path / "t", chat_template=template), write_draft(tmp_path / "d"), dtype="float32")
    with running(pair) as server:
        status, error = server.refused("/v1/chat/completions", ASK)
    assert status == 400
    assert "roles must alternate" in error["message"]
