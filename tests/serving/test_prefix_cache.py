"""A beginning that was asked before: counted in the answer and in the metrics, and invisible in its words."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Running, running

from k3dspark.decoding import FullBlock
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput
from k3dspark.serving.server import EngineSettings, build_service
from k3dspark.serving.settings import Settings

SYSTEM = "You are a careful assistant who answers in one short sentence, in plain words and without any list. "


def serving(prefix_rows: int | None, **more: Any) -> EngineSettings:
    return EngineSettings(FullBlock(), exact=True, prefix_rows=prefix_rows, **more)


def ask(server: Running, question: str, **fields: Any) -> dict[str, Any]:
    return server.complete(SYSTEM + question, max_tokens=12, ignore_eos=True, **fields)


def test_cached_tokens_are_in_usage_and_in_the_metrics_under_vllms_names(pair: ModelPair) -> None:
    with running(pair, engine=serving(4096)) as server, running(pair, engine=serving(None)) as without:
        for number, question in enumerate(("Why?", "How?", "Who?")):
            warm, cold = ask(server, question), ask(without, question)
            assert warm["choices"] == cold["choices"]
            assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 96 if number else 0}
            length = "mean_acceptance_length"
            warm_figures, cold_figures = (a["metrics"]["speculative_decoding"] for a in (warm, cold))
            assert warm_figures[length] == cold_figures[length]
        assert server.metric("prefix_cache_queries_total") == server.metric("prompt_tokens_total")
        assert server.metric("prefix_cache_hits_total") == 2 * 96
        assert server.metric("prefix_cache_rows") >= 96
        assert without.metric("prefix_cache_queries_total") == without.metric("prefix_cache_rows") == 0
        assert server.metric("kv_cache_rows") == 0, "rows that requests hold; those kept for later are apart"


def test_requests_of_another_salt_find_nothing(pair: ModelPair) -> None:
    with running(pair, engine=serving(4096)) as server:
        answers = [ask(server, "Why?", **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {})]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 0, 96, 96]
        assert server.refused("/v1/completions", {"prompt": "a", "cache_salt": ""})[0] == 400


def test_choices_of_one_prompt_count_its_cached_tokens_once(pair: ModelPair) -> None:
    with running(pair, engine=serving(4096)) as server:
        ask(server, "Why?")
        answer = ask(server, "Why?", n=3)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}


def test_cache_rows_that_hold_no_round_are_refused(pair: ModelPair) -> None:
    with pytest.raises(BadInput, match="9 rows"):
        build_service(pair, serving(None, cache_rows=1), Settings())


def test_top_k_beyond_any_vocabulary_is_a_400(server: Running) -> None:
    status, error = server.refused("/v1/completions", {"prompt": "a", "temperature": 1, "top_k": 2**70})
    assert status == 400
    assert "top_k" in error["message"]
    assert server.complete("a", max_tokens=1, temperature=1, top_k=2**31 - 1)["choices"]
