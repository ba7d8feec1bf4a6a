"""What the monitor knows, as a Prometheus endpoint in one naming, whichever engines are behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3dspark.errors import BadInput
from k3dspark.monitoring.figures import Figures, Latency
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.snapshot import Snapshot

PREFIX: Final = "dspark_"
_RANK: Final = ("model", "engine", "source", "rank")
_MODEL: Final = ("model",)

# Counters that the engines reset and these do not: counted since the watching began.
_COUNTERS: Final = {
    "rounds": "Decoding rounds, once for each request in them.",
    "drafted": "Draft tokens verified.",
    "accepted": "Draft tokens that entered the output.",
    "generated": "Tokens generated.",
    "prompt": "Prompt tokens read.",
    "preemptions": "Requests that lost their cache rows.",
}
_GAUGES: Final = {
    "acceptance_length": "1 + accepted / rounds over the window, the bonus token included.",
    "acceptance_rate": "accepted / drafted over the window.",
    "proposals_per_round": "drafted / rounds over the window.",
    "tokens_per_second": "Tokens generated a second.",
    "prompt_tokens_per_second": "Prompt tokens read a second.",
    "running": "Requests being decoded.",
    "waiting": "Requests queued.",
    "cache_usage": "Target cache in use, 0 to 1; of several ranks the fullest.",
    "prefix_hit_ratio": "Prompt tokens found in the prefix cache, 0 to 1.",
    "round_seconds": "Mean time of one request's round.",
}
_LATENCIES: Final = {
    "first_token": "Arrival to first token.",
    "per_token": "Time between output tokens.",
    "end_to_end": "Arrival to last token.",
    "queue": "Arrival to prefill.",
}
_DEVICE: Final = {
    "utilisation": ("utilisation_ratio", "Compute units busy, 0 to 1."),
    "memory_used_bytes": ("memory_used_bytes", "Device memory in use."),
    "memory_total_bytes": ("memory_total_bytes", "Device memory."),
    "bandwidth_use": ("memory_bandwidth_ratio", "Memory bandwidth in use, 0 to 1."),
    "power_watts": ("power_watts", "Power drawn."),
    "temperature_celsius": ("temperature_celsius", "Temperature."),
    "healthy": ("healthy", "1 where the exporter calls the device healthy."),
}


class SnapshotCollector(Collector):
    """Gives the last snapshot to whoever scrapes; `update` puts in a new one. Safe to use from two threads."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._lock = Lock()
        self._families: list[Metric] = []

    def update(self, snapshot: Snapshot) -> None:
        families = list(self._build(snapshot))
        with self._lock:
            self._families = families

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(self._families)

    def _build(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield from self._counters()
        yield from _model_gauges(snapshot)
        yield from _devices(snapshot)
        yield from _sources(snapshot)

    def _counters(self) -> Iterator[Metric]:
        totals = self._monitor.totals()
        for key, words in _COUNTERS.items():
            family = CounterMetricFamily(f"{PREFIX}{key}", words, labels=_RANK)
            for rank, change in totals:
                if key in change.counters:
                    labels = (rank.model, rank.dialect.name, rank.source, rank.rank)
                    family.add_metric(labels, change.counters[key])
            yield family
        slots = CounterMetricFamily(f"{PREFIX}accepted_per_slot", "Accepted by slot, from 1.", labels=(*_RANK, "slot"))
        for rank, change in totals:
            for slot, value in enumerate(change.accepted_per_slot, 1):
                slots.add_metric((rank.model, rank.dialect.name, rank.source, rank.rank, str(slot)), value)
        yield slots


def _model_gauges(snapshot: Snapshot) -> Iterator[Metric]:
    for key, words in _GAUGES.items():
        family = GaugeMetricFamily(f"{PREFIX}{key}", words, labels=_MODEL)
        ranks = GaugeMetricFamily(f"{PREFIX}rank_{key}", f"{words} Of one rank.", labels=_RANK)
        for model in snapshot.models:
            _add(family, (model.model,), getattr(model.whole, key))
            for rank in model.ranks:
                _add(ranks, (model.model, rank.dialect, rank.source, rank.rank), getattr(rank.figures, key))
        yield family
        yield ranks
    slots = GaugeMetricFamily(
        f"{PREFIX}slot_acceptance", "Share of rounds whose slot was accepted.", labels=("model", "slot")
    )
    resets = GaugeMetricFamily(f"{PREFIX}window_resets", "Restarts seen in the window.", labels=_MODEL)
    even = GaugeMetricFamily(
        f"{PREFIX}break_even_length", "Acceptance length from which on drafting pays.", labels=("model", "basis")
    )
    for model in snapshot.models:
        for slot, share in enumerate(model.whole.slots, 1):
            slots.add_metric((model.model, str(slot)), share)
        resets.add_metric((model.model,), model.whole.resets)
        if model.break_even is not None:
            even.add_metric((model.model, model.break_even.basis), model.break_even.length)
    yield from (slots, resets, even)
    for key, words in _LATENCIES.items():
        family = GaugeMetricFamily(f"{PREFIX}{key}_seconds", words, labels=("model", "statistic"))
        for model in snapshot.models:
            _add_latency(family, model.model, model.whole, key)
        yield family


def _add_latency(family: GaugeMetricFamily, model: str, figures: Figures, key: str) -> None:
    latency: Latency | None = getattr(figures, key)
    if latency is not None:
        for statistic in ("mean", "p50", "p90", "p99"):
            _add(family, (model, statistic), getattr(latency, statistic))


def _devices(snapshot: Snapshot) -> Iterator[Metric]:
    for key, (name, words) in _DEVICE.items():
        family = GaugeMetricFamily(f"{PREFIX}device_{name}", words, labels=("source", "device", "name"))
        for device in snapshot.devices:
            _add(family, (device.source, device.id, device.name), getattr(device, key))
        yield family


def _sources(snapshot: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily(f"{PREFIX}source_up", "1 if the last scrape succeeded.", labels=("source", "kind"))
    failed = CounterMetricFamily(f"{PREFIX}source_failures", "Scrapes that failed.", labels=("source",))
    resets = CounterMetricFamily(f"{PREFIX}source_resets", "Restarts seen.", labels=("source",))
    missing = GaugeMetricFamily(
        f"{PREFIX}family_missing", "1 for a family that is expected and absent.", labels=("source", "family")
    )
    for source in snapshot.sources:
        up.add_metric((source.source, source.kind), float(source.up))
        failed.add_metric((source.source,), source.failures)
        resets.add_metric((source.source,), source.resets)
        for name in source.missing:
            missing.add_metric((source.source, name), 1)
    yield from (up, failed, resets, missing)


def _add(family: Any, labels: tuple[str, ...], value: float | bool | None) -> None:
    if value is not None:
        family.add_metric(labels, float(value))


def listen_address(text: str) -> tuple[str, int]:
    """`PORT`, `HOST:PORT` or `[v6]:PORT`; without a host, this machine only. Raises `BadInput`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise BadInput(f"{text} is no address to listen on", "it must end in a port number", "write PORT or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(collector: SnapshotCollector, host: str, port: int) -> tuple[WSGIServer, Thread]:
    """Answer scrapes from a thread of its own. Raises `BadInput` when the address cannot be had."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        return start_http_server(port, host, registry)
    except OSError as error:
        raise BadInput(f"cannot listen on {host}:{port}", str(error), "choose another --listen address") from error
