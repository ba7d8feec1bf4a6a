"""Our own server's families are those that the monitor reads."""

from __future__ import annotations

import pytest
import torch

from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.figures import Figures
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.ranks import missing_families, read_ranks
from k3dspark.monitoring.scrape import Scrape
from k3dspark.serving.metrics import Metrics


def test_rounds_of_our_server_are_counted_as_it_counts_them() -> None:
    metrics = Metrics("pair", 3, torch.device("cpu"), {"draft": "embedded"})
    monitor = Monitor(["a"])

    def scraped(time: float) -> Figures:
        monitor.feed([Scrape("a", time, parse(metrics.text().decode()))])
        return monitor.snapshot().models[0].whole

    metrics.round(3, 1, [0.5, 0.2, 0.1])
    scraped(0.0)
    for verified, accepted in ((3, 3), (2, 1), (0, 0), (3, 0)):
        metrics.round(verified, accepted, [0.5, 0.2, 0.1])
        metrics.between_tokens.observe(0.05)
        metrics.phase("draft", 0.01)
        metrics.phase("verify", 0.03)
    whole = scraped(2.0)
    # A round that verified nothing still cost a step of the target: it counts.
    assert (whole.rounds, whole.drafted, whole.accepted) == (4, 8, 4)
    assert whole.acceptance_length == 2.0
    assert whole.slots == (0.5, 0.25, 0.25)
    assert whole.draft_share == pytest.approx(0.25)
    assert whole.round_seconds == pytest.approx(0.05)
    assert whole.resets == 0


def test_our_server_misses_no_family() -> None:
    exposition = parse(Metrics("pair", 7, torch.device("cpu"), {}).text().decode())
    assert missing_families(exposition, read_ranks(exposition, "a", 0.0)) == ()
