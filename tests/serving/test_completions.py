"""POST /v1/completions on a real socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from harness import Running

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.embedded.pair import ModelPair


def usage(prompt: int, new: int) -> dict[str, Any]:
    """Of an answer whose prompt was not in the prefix cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def alone(pair: ModelPair, prompt: str, count: int, **sampling: Any) -> tuple[str, list[int]]:
    """What the engine gives for one request and nothing else: its text and its tokens."""
    params = SamplingParams(count, stop_token_ids=pair.stop_ids, **sampling)
    result = Engine(pair.target, pair.draft, exact=True, decode=pair.text).generate(pair.raw_ids(prompt), params)
    return pair.text(result.token_ids), list(result.token_ids)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose last line must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_answer_is_the_engines_own(server: Running, pair: ModelPair) -> None:
    answer = server.complete("Once upon", max_tokens=24)
    text, tokens = alone(pair, "Once upon", 24)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"] == usage(9, len(tokens))
    assert answer["object"] == "text_completion"
    assert answer["model"] == "target"


def test_sixteen_tokens_when_nothing_is_said(server: Running) -> None:
    answer = server.complete("Hi", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_whole_answer(server: Running) -> None:
    whole = server.complete("The sea", max_tokens=24, ignore_eos=True)
    body = {"prompt": "The sea", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
    chunks = events(server.post("/v1/completions", body))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "length"]
    assert len({c["id"] for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)


def test_usage_and_statistics_close_a_stream_when_asked_for(server: Running) -> None:
    body = {"prompt": "The sea", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
    last = events(server.post("/v1/completions", body | {"stream_options": {"include_usage": True}}))[-1]
    assert last["choices"] == []
    assert last["usage"] == usage(7, 30)
    assert last["metrics"]["speculative_decoding"]["rounds"] > 0


def test_the_statistics_of_a_request_agree_with_each_other(server: Running) -> None:
    answer = server.complete("Numbers", max_tokens=24, ignore_eos=True, n=2)
    speculation = answer["metrics"]["speculative_decoding"]
    rounds, accepted = speculation["rounds"], speculation["accepted_tokens"]
    assert rounds + accepted == 2 * 24 - 2, "every round commits its accepted tokens and one more; prefill the first"
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)
    assert sum(speculation["accepted_per_slot"]) == accepted
    assert speculation["draft_acceptance_rate"] == pytest.approx(accepted / speculation["draft_tokens"])
    assert answer["metrics"]["time_to_first_token_seconds"] > answer["metrics"]["queue_seconds"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(server: Running, streamed: bool) -> None:
    text = server.complete("Stop here", max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    stop = text[8:11]
    expected = text[: text.index(stop)]
    body = {"prompt": "Stop here", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stop": ["no such", stop]}
    if streamed:
        chunks = events(server.post("/v1/completions", body | {"stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = server.post("/v1/completions", body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


def test_a_stop_token_ends_the_answer_without_its_text(server: Running, pair: ModelPair) -> None:
    text, tokens = alone(pair, "Token", 30)
    at = next(i for i, t in enumerate(tokens) if i > 4 and t not in tokens[:i])
    choice = server.complete("Token", max_tokens=30, stop_token_ids=[tokens[at]])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (pair.text(tokens[:at]), "stop")
    assert text.startswith(choice["text"])


def test_a_seed_repeats_and_choices_differ(server: Running) -> None:
    first = server.complete("Dice", max_tokens=8, temperature=1, seed=7, n=3)
    again = server.complete("Dice", max_tokens=8, temperature=1, seed=7, n=3)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert server.complete("Dice", max_tokens=8, temperature=1, seed=8)["choices"][0]["text"] == texts[1]


def test_seeds_of_any_size_and_sign_are_taken(server: Running) -> None:
    assert (
        server.complete("Dice", temperature=1, seed=-1)["choices"][0]["text"]
        == (server.complete("Dice", temperature=1, seed=2**64 - 1)["choices"][0]["text"])
    )


def test_several_prompts_are_answered_in_order(server: Running) -> None:
    prompts = ["one", "two two", "three"]
    together = server.complete(prompts, max_tokens=10, n=2)["choices"]
    for number, prompt in enumerate(prompts):
        text = server.complete(prompt, max_tokens=10)["choices"][0]["text"]
        assert [c["text"] for c in together[2 * number : 2 * number + 2]] == [text, text]


def test_token_ids_are_a_prompt_too(server: Running, pair: ModelPair) -> None:
    ids = pair.raw_ids("Hello")
    expected = server.complete("Hello")["choices"][0]["text"]
    assert server.complete(ids)["choices"][0]["text"] == expected
    assert [c["text"] for c in server.complete([ids, ids])["choices"]] == [expected, expected]


def test_echo_puts_the_prompt_before_the_answer(server: Running, pair: ModelPair) -> None:
    answer = server.complete("Hello")["choices"][0]["text"]
    assert server.complete("Hello", echo=True)["choices"][0]["text"] == "Hello" + answer
    assert server.complete(pair.raw_ids("Hello"), echo=True)["choices"][0]["text"] == "Hello" + answer


def test_logprobs_are_parallel_lists_over_the_tokens(server: Running, pair: ModelPair) -> None:
    answer = server.complete("Scores", max_tokens=12, logprobs=3, ignore_eos=True)
    scores = answer["choices"][0]["logprobs"]
    assert [len(scores[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [12] * 4
    best = [max(top.values()) for top in scores["top_logprobs"]]
    assert scores["token_logprobs"] == pytest.approx(best), "greedy takes the best token"
    assert scores["text_offset"][0] == 0
    assert scores["text_offset"] == sorted(scores["text_offset"])


def test_streamed_logprobs_are_the_same(server: Running) -> None:
    body = {"prompt": "Scores", "max_tokens": 12, "logprobs": 2, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = events(server.post("/v1/completions", body | {"stream": True}))
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert {key: [value for part in parts for value in part[key]] for key in whole} == whole


def test_bias_and_penalties_reach_the_engine(server: Running, pair: ModelPair) -> None:
    favourite = pair.raw_ids("A")[0]
    assert server.complete("Bias", max_tokens=5, logit_bias={str(favourite): 100})["choices"][0]["text"] == "AAAAA"
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3}
    text, _ = alone(pair, "Bias", 20, **penalties)
    assert server.complete("Bias", max_tokens=20, **penalties)["choices"][0]["text"] == text


def test_sampling_fields_reach_the_engine(server: Running, pair: ModelPair) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "seed": 3}
    text, _ = alone(pair, "Sample", 20, **sampling)
    assert server.complete("Sample", max_tokens=20, **sampling)["choices"][0]["text"] == text


def test_top_k_of_minus_one_is_off(server: Running) -> None:
    sampled = {"temperature": 1, "seed": 5}
    off = server.complete("K", top_k=-1, **sampled)["choices"][0]["text"]
    assert off == server.complete("K", **sampled)["choices"][0]["text"]


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 1e-300}, {"temperature": 100}, {"top_p": 5e-324}, {"min_p": 5e-324}, {"repetition_penalty": 0.01},
     {"repetition_penalty": 100}, {"top_k": 2**31 - 1}, {"logit_bias": {"3": -100, "4": 100}}],
)  # fmt: skip
def test_extreme_sampling_gives_an_answer_and_no_fault(server: Running, extreme: dict[str, Any]) -> None:
    answer = server.complete("Far", **{"temperature": 1, "seed": 1, "max_tokens": 4, "ignore_eos": True} | extreme)
    assert answer["usage"]["completion_tokens"] == 4


def test_the_answer_is_cut_at_the_context(server: Running) -> None:
    answer = server.complete("x" * 500, max_tokens=100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_empty_prompt_begins_with_the_tokenizers_first_token(server: Running) -> None:
    assert server.complete("", max_tokens=5)["usage"]["prompt_tokens"] == 1
