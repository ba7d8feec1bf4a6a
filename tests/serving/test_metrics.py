"""Counters that add up to the responses, and the metric names that dashboards rely on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import Running, running
from prometheus_client.parser import text_string_to_metric_families

from k3dspark.decoding import FixedLength, Threshold
from k3dspark.embedded.pair import ModelPair
from k3dspark.serving.server import EngineSettings

# vLLM's names: its dashboards work with the prefix changed
FAMOUS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "num_preemptions_total",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
)  # fmt: skip


def scrape(server: Running) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_counters_add_up_to_the_responses(pair: ModelPair) -> None:
    jobs: list[dict[str, Any]] = [
        {"prompt": f"Question {i}", "max_tokens": 8 + i, "temperature": i % 2, "seed": i, "n": 1 + i % 3}
        for i in range(6)
    ]
    with running(pair) as server:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda job: server.complete(**job), jobs))
        speculation = [answer["metrics"]["speculative_decoding"] for answer in answers]
        choices = [choice for answer in answers for choice in answer["choices"]]

        def total(key: str) -> int:
            return sum(part[key] for part in speculation)

        assert server.metric("generation_tokens_total") == sum(a["usage"]["completion_tokens"] for a in answers)
        assert server.metric("prompt_tokens_total") == sum(
            a["usage"]["prompt_tokens"] * (1 + i % 3) for i, a in enumerate(answers)
        )
        for reason in ("stop", "length"):
            finished = sum(choice["finish_reason"] == reason for choice in choices)
            assert server.metric("request_success_total", finished_reason=reason) == finished
        assert server.metric("spec_decode_num_rounds_total") == total("rounds")
        assert server.metric("spec_decode_num_draft_tokens_total") == total("draft_tokens")
        assert server.metric("spec_decode_num_accepted_tokens_total") == total("accepted_tokens")
        for slot in range(7):
            accepted = sum(part["accepted_per_slot"][slot] for part in speculation)
            assert server.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(slot)) == accepted
        assert server.metric("spec_decode_verify_length_total") == total("rounds")
        assert server.metric("e2e_request_latency_seconds_count") == len(choices)
        assert server.metric("inter_token_latency_seconds_count") == (
            sum(a["usage"]["completion_tokens"] for a in answers) - len(choices)
        )
        assert server.metric("http_responses_total", endpoint="/v1/completions", status="200") == 6
        assert server.metric("num_requests_running") == server.metric("kv_cache_rows") == 0


def test_names_and_labels_are_vllms_with_our_prefix(server: Running) -> None:
    server.complete("names", max_tokens=4, ignore_eos=True)
    samples = scrape(server)
    missing = [name for name in FAMOUS if f"k3dspark:{name}" not in samples]
    assert missing == []
    labels, _ = samples["k3dspark:num_requests_running"][0]
    assert labels == {"model_name": "target", "engine": "0"}
    assert not any(name.endswith("_created") for name in samples if name.startswith("k3dspark:"))
    assert samples["process_resident_memory_bytes"][0][1] > 1e6


def test_chosen_lengths_follow_the_schedule(pair: ModelPair) -> None:
    with running(pair, engine=EngineSettings(FixedLength(3), "fixed")) as server:
        server.complete("lengths", max_tokens=30, ignore_eos=True)
        rounds = server.metric("spec_decode_num_rounds_total")
        full = server.metric("spec_decode_verify_length_total", length="3")
        assert rounds - full <= 3, "only the last rounds are cut by the token limit"
        assert full > 0


def test_predicted_survival_is_what_the_schedule_decided_by(pair: ModelPair) -> None:
    """With a threshold, every verified slot was predicted to survive at least that often."""
    with running(pair, engine=EngineSettings(Threshold(0.25), "threshold")) as server:
        server.complete("survival", max_tokens=40, ignore_eos=True, n=2)
        verified = server.metric("spec_decode_num_draft_tokens_per_pos_total", position="0")
        predicted = server.metric("spec_decode_predicted_survival_per_pos_total", position="0")
        assert verified > 0
        assert 0.25 <= predicted / verified <= 1


def test_time_is_accounted_for(server: Running) -> None:
    server.complete("time", max_tokens=20, ignore_eos=True)
    phases = {p: server.metric("engine_phase_seconds_total", phase=p) for p in ("draft", "verify", "host", "prefill")}
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(server.metric("engine_busy_seconds_total"), rel=0.01)


def test_scanned_paths_do_not_become_series(server: Running) -> None:
    server.get("/wp-admin")
    server.get("/v1/../etc")
    endpoints = {labels["endpoint"] for labels, _ in scrape(server)["k3dspark:http_responses_total"]}
    assert "/wp-admin" not in endpoints
    assert "other" in endpoints


def test_the_dashboard_asks_for_nothing_but_metrics(server: Running) -> None:
    page = server.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert page.text.count("fetch(") == 1
    assert "fetch('/metrics'" in page.text
