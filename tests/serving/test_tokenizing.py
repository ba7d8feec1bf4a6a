"""Ids on both sides of the wire: /tokenize, /detokenize, and return_token_ids."""

from __future__ import annotations

import json
from typing import Any

from harness import Running, running

from k3dspark.embedded.pair import ModelPair
from k3dspark.serving.settings import Settings


def test_tokenize_gives_what_the_model_would_read_and_detokenize_undoes_it(server: Running, pair: ModelPair) -> None:
    told = server.post("/tokenize", {"prompt": "héllo"}).json()
    assert told == {"count": 6, "max_model_len": 512, "tokens": pair.raw_ids("héllo")}
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "héllo"}


def test_a_conversation_is_tokenized_in_the_template(server: Running, pair: ModelPair) -> None:
    told = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert told["tokens"] == pair.chat_ids("Hi")


def test_ids_of_prompt_and_answer_come_when_asked_for(server: Running, pair: ModelPair) -> None:
    choice = server.complete("Once", max_tokens=12, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == pair.raw_ids("Once")
    assert pair.text(choice["token_ids"]) == choice["text"]
    assert "token_ids" not in server.complete("Once", max_tokens=12)["choices"][0]


def test_ids_of_a_stream_add_up_to_those_of_the_whole_answer(server: Running) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 20,
                             "return_token_ids": True}  # fmt: skip
    whole = server.post("/v1/chat/completions", asked).json()
    streamed = server.post("/v1/chat/completions", asked | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    ids = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]


def test_a_wrong_id_and_an_empty_question_are_refused(server: Running) -> None:
    assert server.refused("/detokenize", {"tokens": [999]})[0] == 400
    assert server.refused("/tokenize", {})[0] == 400


def test_keys_guard_them_too(pair: ModelPair) -> None:
    with running(pair, Settings(api_keys=("secret",))) as locked:
        assert locked.refused("/tokenize", {"prompt": "x"})[0] == 401
        allowed = locked.post("/tokenize", {"prompt": "x"}, headers={"Authorization": "Bearer secret"})
        assert allowed.status_code == 200


def test_tokens_of_logprobs_are_named_by_id_when_asked_for(server: Running) -> None:
    asked = {"max_tokens": 8, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = server.complete("Once", **asked)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for best in choice["logprobs"]["top_logprobs"] for name in best)
