"""The server's Prometheus metrics, in a registry of its own; vLLM's names with the prefix `k3dspark:`.

docs/serve.md lists them. Every choice of an answer counts as one request, as it is one to the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from k3dspark.decoding import DecodeStats, FinishReason

PREFIX = "k3dspark:"
LABELS = ("model_name", "engine")
# The client library adds a time of creation to every series; nobody asked for them.
_CREATED = re.compile(rb"^(?:# (?:HELP|TYPE) )?k3dspark:\w+_created[ {].*\n", re.MULTILINE)
PHASES = ("draft", "verify", "host", "prefill")


def steps(low: int, high: int) -> tuple[float, ...]:
    """1, 2.5 and 5 times the powers of ten from 10^low to 10^high, in seconds or tokens."""
    series = [float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 2.5, 5)]
    return (*series, float(f"1e{high}"))


class Metrics:
    """Counters, gauges and histograms of one server. Safe to use from any thread."""

    def __init__(self, model_name: str, block: int, device: torch.device, info: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Device(device))
        self._labels = {"model_name": model_name, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Requests in the decoding batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue or in prefill.")
        self.cache_use = self._gauge("kv_cache_usage_perc", "Cache rows held over cache rows allowed, 0 to 1.")
        self.cache_rows = self._gauge("kv_cache_rows", "Cache rows (tokens) that the target holds.")
        self.prefix_rows = self._gauge("prefix_cache_rows", "Tokens kept for prompts that begin alike.")
        self.up = self._gauge("engine_up", "1 while the engine thread lives.")
        self.draining = self._gauge("engine_draining", "1 from SIGTERM on.")
        self._gauge("engine_info", "Settings of the engine as labels.", tuple(info), info).set(1)
        self._gauge("spec_decode_block_size", "Tokens that the draft proposes in a round; 0 without one.").set(block)

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Of those, tokens found there.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.preemptions = self._counter("num_preemptions", "Times a request's cache rows were freed for older ones.")
        self.faults = self._counter("engine_faults", "Steps that failed.")
        self.busy = self._counter("engine_busy_seconds", "Seconds in which the engine was working.")
        self._queried = self._hit = 0
        self._success = self._counters("request_success", "Requests that ended, by reason.", "finished_reason")
        self._responses = self._counters("http_responses", "HTTP responses.", "endpoint", "status")
        self._seconds = self._counters("engine_phase_seconds", "Seconds of the engine in each phase.", "phase")

        times, fine = steps(-3, 3), steps(-4, 2)
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", times)
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Time between tokens; a round's time is shared by its tokens.", fine
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", fine
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", times)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to prefill.", times)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Prefill to first token.", times)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", times)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", steps(0, 6))
        self.request_new = self._histogram("request_generation_tokens", "Generated tokens of a request.", steps(0, 6))
        self.batch = self._histogram("iteration_tokens", "Tokens committed by one engine step.", steps(0, 4))

        self.rounds = self._counter("spec_decode_num_rounds", "Decoding rounds, counted once for each request in them.")
        self.drafts = self._counter(
            "spec_decode_num_drafts", "Of those, rounds that verified at least one draft token."
        )
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that entered the output.")
        self._verified_at = self._counters("spec_decode_num_draft_tokens_per_pos", "Verified by slot.", "position")
        self._accepted_at = self._counters("spec_decode_num_accepted_tokens_per_pos", "Accepted by slot.", "position")
        self._predicted_at = self._counters(
            "spec_decode_predicted_survival_per_pos", "Sum of predicted survivals of verified slots.", "position"
        )
        self._lengths = self._counters("spec_decode_verify_length", "Rounds by chosen verify length.", "length")
        for position in range(block):
            for family in (self._verified_at, self._accepted_at, self._predicted_at):
                family.labels(**self._labels, position=str(position))
        for length in range(block + 1 if block else 0):
            self._lengths.labels(**self._labels, length=str(length))
        for reason in FinishReason:
            self._success.labels(**self._labels, finished_reason=_REASON[reason])
        for phase in PHASES:
            self._seconds.labels(**self._labels, phase=phase)

    def finished(
        self, reason: FinishReason, stats: DecodeStats, arrived: float, first: float | None, now: float
    ) -> None:
        """A request ended; times on the clock of `time.perf_counter`, `first` None when it never got a token."""
        self._success.labels(**self._labels, finished_reason=_REASON[reason]).inc()
        if first is None:
            return
        self.end_to_end.observe(now - arrived)
        self.decode_time.observe(now - first)
        self.request_prompt.observe(stats.prompt_tokens)
        self.request_new.observe(stats.new_tokens)
        if stats.new_tokens > 1:
            self.per_token.observe((now - first) / (stats.new_tokens - 1))

    def round(self, verified: int, accepted: int, survival: Sequence[float]) -> None:
        """One request's part in a round; `survival` holds the predicted survivals of its slots."""
        self.rounds.inc()
        self.drafts.inc(verified > 0)
        self.drafted.inc(verified)
        self.accepted.inc(accepted)
        self._lengths.labels(**self._labels, length=str(verified)).inc()
        for slot in range(verified):
            position = {**self._labels, "position": str(slot)}
            self._verified_at.labels(**position).inc()
            self._accepted_at.labels(**position).inc(slot < accepted)
            self._predicted_at.labels(**position).inc(float(survival[slot]))

    def prefix(self, rows: int, queried: int, hit: int) -> None:
        """What the prefix cache holds, and its totals so far."""
        self.prefix_rows.set(rows)
        self.prefix_queries.inc(queried - self._queried)
        self.prefix_hits.inc(hit - self._hit)
        self._queried, self._hit = queried, hit

    def phase(self, name: str, seconds: float) -> None:
        self._seconds.labels(**self._labels, phase=name).inc(max(seconds, 0.0))

    def response(self, endpoint: str, status: int) -> None:
        self._responses.labels(**self._labels, endpoint=endpoint, status=str(status)).inc()

    def text(self) -> bytes:
        """The exposition of everything, for a scraper."""
        return _CREATED.sub(b"", generate_latest(self.registry))

    def _gauge(self, name: str, words: str, labels: Sequence[str] = (), values: dict[str, str] | None = None) -> Gauge:
        gauge = Gauge(PREFIX + name, words, (*LABELS, *labels), registry=self.registry)
        return gauge.labels(**self._labels, **(values or {}))

    def _counters(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, words, (*LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, words: str) -> Counter:
        return self._counters(name, words).labels(**self._labels)

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, words, LABELS, registry=self.registry, buckets=buckets).labels(**self._labels)


_REASON = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",  # vLLM's word
    FinishReason.ERROR: "error",
}


class _Device(Collector):
    """Cores and threads, or the memory of an accelerator, read when somebody scrapes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def collect(self) -> Iterable[GaugeMetricFamily]:
        threads = GaugeMetricFamily(
            PREFIX + "device_cpu_threads", "Threads that PyTorch computes with.", labels=("device",)
        )
        threads.add_metric([str(self._device)], torch.get_num_threads())
        yield threads
        accelerator: Any = getattr(torch, self._device.type, None)
        if self._device.type != "cpu" and hasattr(accelerator, "mem_get_info"):
            free, total = accelerator.mem_get_info(self._device)
            memory = GaugeMetricFamily(PREFIX + "device_memory_bytes", "Device memory.", labels=("device", "kind"))
            memory.add_metric([str(self._device), "used"], total - free)
            memory.add_metric([str(self._device), "total"], total)
            yield memory
