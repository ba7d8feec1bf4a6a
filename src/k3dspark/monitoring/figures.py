"""The figures of a window: acceptance, throughput, latency. Every one is None where the engine does not tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from k3dspark.monitoring.change import Change
from k3dspark.monitoring.histogram import Histogram
from k3dspark.monitoring.ranks import Rank

# Accepted tokens by slot and in total are separate counters; a scrape can fall between their increments.
SLOT_TOLERANCE = 0.01


@dataclass(frozen=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Figures:
    """What a group of ranks did in a window.

    `acceptance_length` = 1 + accepted / rounds = 1 + Σ `slots`, the bonus token included; `acceptance_rate` = accepted
    / drafted; `slots[k]` is the share of rounds whose slot k+1 was accepted. `basis`: from counters over the window,
    or from gauges the engine averaged itself ("gauges"), in which case nothing can be pooled exactly.
    """

    basis: Literal["counters", "gauges", "none"]
    seconds: float
    rounds: float | None
    drafted: float | None
    accepted: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    slots: tuple[float, ...]
    proposals_per_round: float | None
    generated: float | None
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    running: float | None
    waiting: float | None
    cache_usage: float | None
    prefix_hit_ratio: float | None
    mean_prompt_tokens: float | None
    preemptions: float | None
    first_token: Latency | None
    per_token: Latency | None
    end_to_end: Latency | None
    queue: Latency | None
    # A whole round of one request, and by our server the phases it spends its time in.
    round_seconds: float | None
    draft_share: float | None
    resets: int
    notes: tuple[str, ...]

    @property
    def conditional_slots(self) -> tuple[float, ...]:
        """For each slot, the share accepted of the rounds whose slot before was accepted."""
        before = 1.0
        shares = []
        for share in self.slots:
            shares.append(share / before if before > 0 else 0.0)
            before = share
        return tuple(shares)


def figures(parts: Sequence[tuple[Rank, Change]]) -> Figures:
    """The figures of these ranks together: counts added up, rates added up, latencies pooled."""
    sums = reduce(Change.plus, (change for _, change in parts), Change())
    ranks = [rank for rank, _ in parts]
    count = sums.counters.get
    rounds, drafted, accepted = count("rounds"), count("drafted"), count("accepted")
    notes: list[str] = []
    length = rate = proposals = None
    basis: Literal["counters", "gauges", "none"] = "none"
    slots: tuple[float, ...] = ()
    if rounds is not None and accepted is not None:
        basis = "counters"
        if rounds > 0:
            length = 1 + accepted / rounds
            slots = tuple(value / rounds for value in sums.accepted_per_slot)
            proposals = drafted / rounds if drafted is not None else None
            if slots and abs(sum(slots) - (length - 1)) > SLOT_TOLERANCE + 2 / rounds:
                notes.append("slots_do_not_add_up")
        rate = accepted / drafted if drafted else None
    elif any(rank.gauges.get("length", 0) > 0 for rank in ranks):
        basis = "gauges"
        length, rate, proposals, more = _from_gauges(ranks)
        notes += more
    if sums.resets:
        notes.append("counters_were_reset")
    histograms = sums.histograms
    tokens = _rate(parts, "generated")
    if tokens is None:
        gauges = [rank.gauges["tokens_per_second"] for rank in ranks if "tokens_per_second" in rank.gauges]
        tokens = sum(gauges) if gauges else None
    prompts = histograms.get("prompt_length")
    return Figures(
        basis=basis,
        seconds=max((change.seconds for _, change in parts), default=0.0),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        acceptance_length=length,
        acceptance_rate=rate,
        slots=slots,
        proposals_per_round=proposals,
        generated=count("generated"),
        tokens_per_second=tokens,
        prompt_tokens_per_second=_rate(parts, "prompt"),
        running=_gauge_sum(ranks, "running"),
        waiting=_gauge_sum(ranks, "waiting"),
        cache_usage=max((rank.gauges["cache_usage"] for rank in ranks if "cache_usage" in rank.gauges), default=None),
        prefix_hit_ratio=_hit_ratio(sums, ranks),
        mean_prompt_tokens=prompts.mean if prompts else None,
        preemptions=count("preemptions"),
        first_token=_latency(histograms.get("first_token")),
        per_token=_latency(_per_token(parts)),
        end_to_end=_latency(histograms.get("end_to_end")),
        queue=_latency(histograms.get("queue")),
        round_seconds=_round_seconds(parts, length),
        draft_share=_draft_share(sums),
        resets=sums.resets,
        notes=tuple(notes),
    )


def _from_gauges(ranks: Sequence[Rank]) -> tuple[float, float | None, float | None, list[str]]:
    """Length, rate and proposals of SGLang's gauges, ranks weighed by the rounds they did.

    Rounds a second are tokens a second over the length. SGLang's rate had the bonus token in its numerator and the
    anchor in its denominator once, so it is computed from the length instead: (length − 1) / (width − 1).
    """
    speaking = [rank for rank in ranks if rank.gauges.get("length", 0) > 0]
    weights = [rank.gauges.get("tokens_per_second", 0) / rank.gauges["length"] for rank in speaking]
    if not any(weights):
        weights = [1.0] * len(speaking)
    share = [weight / sum(weights) for weight in weights]
    length = sum(rank.gauges["length"] * part for rank, part in zip(speaking, share, strict=True))
    widths = {rank.gauges["width"] for rank in speaking if rank.gauges.get("width", 0) > 1}
    notes = ["gauges_of_the_last_window"]
    if len(widths) != 1:
        return length, None, None, [*notes, "width_not_told"]
    width = widths.pop()
    told = sum(rank.gauges.get("rate", 0.0) * part for rank, part in zip(speaking, share, strict=True))
    rate = (length - 1) / (width - 1)
    if abs(told - length / width) < 0.01 < abs(told - rate):
        notes.append("rate_counts_the_bonus")
    return length, rate, width - 1, notes


def _rate(parts: Sequence[tuple[Rank, Change]], key: str) -> float | None:
    """A counter a second, each rank over its own seconds."""
    rates = [c.counters[key] / c.seconds for _, c in parts if key in c.counters and c.seconds > 0]
    return sum(rates) if rates else None


def _gauge_sum(ranks: Sequence[Rank], key: str) -> float | None:
    values = [rank.gauges[key] for rank in ranks if key in rank.gauges]
    return sum(values) if values else None


def _hit_ratio(sums: Change, ranks: Sequence[Rank]) -> float | None:
    queries = sums.counters.get("cache_queries", sums.counters.get("prompt"))
    if "cache_hits" in sums.counters and queries:
        return sums.counters["cache_hits"] / queries
    return max((rank.gauges["hit_ratio"] for rank in ranks if "hit_ratio" in rank.gauges), default=None)


def _latency(histogram: Histogram | None) -> Latency | None:
    if histogram is None or histogram.mean is None:
        return None
    return Latency(histogram.mean, *(histogram.quantile(share) for share in (0.5, 0.9, 0.99)))


def _per_token(parts: Sequence[tuple[Rank, Change]]) -> Histogram | None:
    """Seconds a token. Where the time between tokens is a round's, the mean over requests is asked instead."""
    found = [
        change.histograms[key]
        for rank, change in parts
        for key in [
            "per_token"
            if rank.dialect.between_tokens == "round" or "between_tokens" not in change.histograms
            else "between_tokens"
        ]
        if key in change.histograms
    ]
    return reduce(Histogram.plus, found) if found else None


def _round_seconds(parts: Sequence[tuple[Rank, Change]], length: float | None) -> float | None:
    """Mean seconds of one request's round (of a plain step, where nothing is drafted)."""
    seconds = rounds = 0.0
    for rank, change in parts:
        times = change.histograms.get("between_tokens")
        if times is None or times.count <= 0:
            continue
        seconds += times.sum
        if rank.dialect.between_tokens == "round":
            rounds += times.count
        elif "rounds" in change.counters and change.counters["rounds"] > 0:
            rounds += change.counters["rounds"]
        else:
            rounds += times.count / (length or 1.0)
    return seconds / rounds if rounds else None


def _draft_share(sums: Change) -> float | None:
    """Of the time of rounds, what drafting took."""
    phases = sums.seconds_by_phase
    whole = sum(phases.get(phase, 0.0) for phase in ("draft", "verify", "host"))
    return phases["draft"] / whole if whole > 0 and "draft" in phases else None
