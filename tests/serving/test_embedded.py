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


def test_a_warm_prefix_changes_neither_words_nor_acceptance() -> None:
    """In exact mode to the round; the second question finds the common beginning of the chat template."""
    pair = load_embedded_pair(dtype="float32")
    system = "You are a helpful guide who answers visitors of a small museum of clocks, briefly and to the point. "
    prompts = [pair.chat_ids(question, system * 2) for question in QUESTIONS[:2]]
    params = SamplingParams(16, stop_token_ids=pair.stop_ids)
    engine = Engine(pair.target, pair.draft, exact=True, prefix_rows=256)
    for number, prompt in enumerate(prompts):
        warm, cold = (
            engine.generate(prompt, params),
            Engine(pair.target, pair.draft, exact=True).generate(prompt, params),
        )
        assert warm.stats.cached_tokens == (32 if number else 0)
        assert warm.token_ids == cold.token_ids
        assert warm.stats.accepted_by_slot == cold.stats.accepted_by_slot
        assert warm.stats.acceptance_length == cold.stats.acceptance_length > 1
