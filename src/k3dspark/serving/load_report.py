"""From exchanges to the figures of a load: throughput, latency percentiles, acceptance; as JSON and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from k3dspark.page import Page
from k3dspark.serving.load import Exchange, LoadSettings


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LoadResult:
    """One run. Latencies are of successful requests; None where none gave the figure.

    `acceptance_length` is pooled over the requests whose server reports it (ours, and vLLM when it is told to).
    """

    concurrency: int
    rate: float | None
    requests: int
    failed: int
    first_error: str | None
    seconds: float
    prompt_tokens: int
    new_tokens: int
    requests_per_second: float
    tokens_per_second: float
    first_token: Percentiles | None
    per_token: Percentiles | None
    whole: Percentiles | None
    acceptance_length: float | None
    acceptance_rate: float | None


def summarise(settings: LoadSettings, exchanges: Sequence[Exchange], seconds: float) -> LoadResult:
    """The figures of one run of `run_load`."""
    good = [e for e in exchanges if e.error is None]
    errors = [e.error for e in exchanges if e.error is not None]
    reports = [e.speculation for e in good if e.speculation and e.speculation.get("rounds")]
    rounds, drafted, accepted = (
        sum(int(r.get(key, 0)) for r in reports) for key in ("rounds", "draft_tokens", "accepted_tokens")
    )
    new_tokens = sum(e.new_tokens for e in good)
    return LoadResult(
        concurrency=settings.concurrency,
        rate=settings.rate,
        requests=len(exchanges),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        seconds=seconds,
        prompt_tokens=sum(e.prompt_tokens for e in good),
        new_tokens=new_tokens,
        requests_per_second=len(good) / seconds,
        tokens_per_second=new_tokens / seconds,
        first_token=percentiles([e.first_token_seconds for e in good]),
        per_token=percentiles([e.per_token_seconds for e in good]),
        whole=percentiles([e.seconds for e in good]),
        acceptance_length=1 + accepted / rounds if rounds else None,
        acceptance_rate=accepted / drafted if drafted else None,
    )


def percentiles(values: Sequence[float | None]) -> Percentiles | None:
    """Nearest-rank percentiles of what is known: each is a time that was really measured."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None

    def at(share: float) -> float:
        return known[max(-int(-share * len(known) // 1) - 1, 0)]

    return Percentiles(at(0.5), at(0.9), at(0.99))


def as_json(settings: LoadSettings, results: Sequence[LoadResult]) -> dict[str, object]:
    """The stable form: what was asked, and one entry a run."""
    asked = {
        "url": settings.url,
        "model": settings.model,
        "endpoint": "chat" if settings.chat else "completions",
        "prompts": len(settings.prompts),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "seed": settings.seed,
    }
    return {"settings": asked, "runs": [asdict(result) for result in results]}


def load_label(result: LoadResult) -> str:
    """What a run is called in a table or a plot."""
    return f"{result.rate:g}/s" if result.rate is not None else str(result.concurrency)


def write_page(path: Path, settings: LoadSettings, results: Sequence[LoadResult]) -> None:
    """A self-contained report with a table and plots over the load."""
    from plotly.graph_objects import Figure, Scatter

    page = Page(f"Load of {settings.model}", f"{settings.url}, answers of up to {settings.max_tokens} tokens")
    page.heading("Runs")
    page.table(COLUMNS, [table_row(result) for result in results])
    failed = [result for result in results if result.failed]
    if failed:
        page.text(f"Some requests failed. The first error: {failed[0].first_error}", tone="bad")
    labels = [load_label(result) for result in results]
    axis = "requests per second offered" if settings.rate is not None else "requests at once"
    pictures: tuple[tuple[str, str, tuple[tuple[str, list[float | None]], ...]], ...] = (
        ("Throughput", "tokens per second", (("tokens per second", [r.tokens_per_second for r in results]),)),
        ("Time to first token", "seconds", _series(results, lambda r: r.first_token)),
        ("Time between tokens", "seconds", _series(results, lambda r: r.per_token)),
        ("Acceptance", "acceptance length", (("acceptance length", [r.acceptance_length for r in results]),)),
    )
    for title, unit, series in pictures:
        if all(value is None for _, values in series for value in values):
            continue
        page.heading(title)
        figure = Figure([Scatter(x=labels, y=values, name=name, mode="lines+markers") for name, values in series])
        figure.update_layout(xaxis_title=axis, yaxis_title=unit, xaxis_type="category", showlegend=len(series) > 1)
        figure.update_yaxes(rangemode="tozero")
        page.figure(figure)
    page.write(path)


def _series(
    results: Sequence[LoadResult], pick: Callable[[LoadResult], Percentiles | None]
) -> tuple[tuple[str, list[float | None]], ...]:
    picked = [pick(result) for result in results]
    return tuple(
        (name, [getattr(p, name) if p is not None else None for p in picked]) for name in ("p50", "p90", "p99")
    )


COLUMNS = (
    "load", "requests", "failed", "tokens/s", "requests/s", "first token p50", "p99", "between tokens p50", "p99",
    "whole p50", "acceptance length",
)  # fmt: skip


def table_row(result: LoadResult) -> tuple[str, ...]:
    """One run under `COLUMNS`; times in milliseconds, but whole requests in seconds."""

    def ms(times: Percentiles | None, name: str) -> str:
        return "–" if times is None else f"{1000 * getattr(times, name):.1f} ms"

    return (
        load_label(result),
        str(result.requests),
        str(result.failed),
        f"{result.tokens_per_second:.1f}",
        f"{result.requests_per_second:.2f}",
        ms(result.first_token, "p50"),
        ms(result.first_token, "p99"),
        ms(result.per_token, "p50"),
        ms(result.per_token, "p99"),
        "–" if result.whole is None else f"{result.whole.p50:.2f} s",
        "–" if result.acceptance_length is None else f"{result.acceptance_length:.2f}",
    )
