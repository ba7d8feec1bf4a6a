"""The embedded pair behind the server: real text, real acceptance, the same words with and without company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import Running, running

from k3dspark.decoding import Engine, FullBlock, SamplingParams
from k3dspark.embedded.pair import load_embedded_pair
from k3dspark.serving.server import EngineSettings

QUESTIONS = ("What is the capital of France?", "Name three colours.", "Why is the sky blue?")


def ask(server: Running, question: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_in_company_are_plain_decodings_of_the_target() -> None:
    pair = load_embedded_pair(dtype="float32")
    with running(pair, engine=EngineSettings(FullBlock(), exact=True)) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda question: ask(server, question), QUESTIONS))
    plain = Engine(pair.target, exact=True)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        expected = plain.generate(pair.chat_ids(question), SamplingParams(24, stop_token_ids=pair.stop_ids))
        assert answer["choices"][0]["message"]["content"] == pair.text(expected.token_ids)
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
    assert sum(a["metrics"]["speculative_decoding"]["accepted_tokens"] for a in answers) > 0
