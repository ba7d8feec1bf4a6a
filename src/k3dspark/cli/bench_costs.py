"""One run of `k3dspark bench --costs`: the load, and what the server's own counters say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING

from k3dspark.errors import BadInput

if TYPE_CHECKING:
    from k3dspark.monitoring.change import Change
    from k3dspark.monitoring.ranks import Rank
    from k3dspark.serving.load import Exchange, LoadSettings
    from k3dspark.serving.step_times import StepTime


def timed_run(
    plan: LoadSettings, draft_tokens: int | None, on_done: Callable[[Exchange], None]
) -> tuple[list[Exchange], float, StepTime]:
    """The exchanges, their seconds, and the time of a step. The warm-up comes before the counters are read."""
    from k3dspark.monitoring.change import between, total
    from k3dspark.serving.load import run_load
    from k3dspark.serving.step_times import step_time

    if plan.warm_up:
        run_load(replace(plan, requests=plan.warm_up, warm_up=0))
    before = _ranks(plan)
    exchanges, seconds = run_load(replace(plan, warm_up=0), on_done)
    known = {rank.key: rank for rank in before}
    after = _ranks(plan)
    change = total(between(known[rank.key], rank) for rank in after if rank.key in known)
    length = draft_tokens if draft_tokens is not None else _length(after, change)
    return exchanges, seconds, step_time(exchanges, plan.concurrency, length, change.accepted_per_slot)


def _ranks(plan: LoadSettings) -> tuple[Rank, ...]:
    from k3dspark.monitoring.ranks import read_ranks
    from k3dspark.monitoring.scrape import Scraper, address

    source = address(plan.url)
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else None
    with Scraper(headers=headers) as scraper:
        (scrape,) = scraper.scrape([source])
    ranks = read_ranks(scrape.exposition, source, time()) if scrape.exposition is not None else ()
    if not ranks:
        raise BadInput(
            f"{source} has no counters of a known engine",
            scrape.fault or "without them nobody knows how many tokens were drafts",
            "measure the engine itself, not a gateway before it; SGLang needs --enable-metrics",
        )
    return ranks


def _length(ranks: tuple[Rank, ...], change: Change) -> int:
    """Draft tokens of a request and step: slots that were verified in most rounds where the engine tells, else all
    slots it has a counter for; 0 without a draft."""
    if change.drafted_per_slot:
        most = max(change.drafted_per_slot)
        return sum(count > most / 2 for count in change.drafted_per_slot) if most else 0
    return max(len(rank.accepted_per_slot) for rank in ranks)
