"""A snapshot for people: tables on a terminal, one line an interval elsewhere."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from k3dspark.monitoring.break_even import BreakEven
from k3dspark.monitoring.devices import Device
from k3dspark.monitoring.figures import Figures, Latency
from k3dspark.monitoring.snapshot import ModelView, Snapshot, SourceView

NOTES: Final = {
    "slots_do_not_add_up": "accepted by slot and accepted in total disagree: slots of some ranks are not counted",
    "counters_were_reset": "an engine restarted in this window; what it did just before is not counted",
    "gauges_of_the_last_window": "the engine gives averages of its own, no counters; while idle they stand still",
    "width_not_told": "the engine does not tell the verify width, so the acceptance rate is unknown",
    "rate_counts_the_bonus": "this SGLang counts the bonus token in its rate; shown is accepted / drafted",
}
BASES: Final = {"given": "given", "measured": "measured without a draft", "bound": "at least"}
_DASH: Final = "–"
_BAR: Final = 24


def plain_line(snapshot: Snapshot) -> str:
    """One line for a log: the figures of each model, then what does not answer."""
    clock = datetime.fromtimestamp(snapshot.time).strftime("%H:%M:%S") if snapshot.time else "--:--:--"
    parts = [_model_line(model) for model in snapshot.models] or ["no engine answers"]
    busy = [device.utilisation for device in snapshot.devices if device.utilisation is not None]
    if busy:
        parts.append(f"{len(busy)} devices {sum(busy) / len(busy):.0%} busy")
    parts += [f"DOWN {source.source}: {source.fault}" for source in snapshot.sources if not source.up]
    parts += [f"missing {name}" for source in snapshot.sources for name in source.missing]
    return f"{clock} " + "; ".join(parts)


def _model_line(model: ModelView) -> str:
    f = model.whole
    even = model.break_even
    words = [
        model.model or "?",
        f"length {_number(f.acceptance_length, 2)}",
        f"break-even {_number(even.length, 2)} ({BASES[even.basis]})" if even else "",
        f"rate {_percent(f.acceptance_rate)}",
        "slots " + " ".join(f"{share:.2f}" for share in f.slots) if f.slots else "",
        f"{_number(f.tokens_per_second, 1)} tok/s",
        f"{_number(f.running, 0)} running {_number(f.waiting, 0)} waiting",
        "RESET" if f.resets else "",
    ]
    return " · ".join(word for word in words if word)


def render(snapshot: Snapshot) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = []
    for model in snapshot.models:
        parts += _model(model)
    if snapshot.devices:
        parts += [Text(), _devices(snapshot.devices)]
    parts += [Text(), _sources(snapshot.sources)]
    return Group(*parts)


def _table(*columns: tuple[str, str]) -> Any:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _model(model: ModelView) -> list[RenderableType]:
    f = model.whole
    window = f"last {f.seconds:.0f} s" if f.seconds else "window unknown"
    parts: list[RenderableType] = [Text.assemble((model.model or "unnamed model", "bold"), (f"  {window}", "dim"))]
    facts = _table(("figure", "left"), ("value", "right"), ("", "left"))
    facts.add_row("acceptance length", _length(f, model.break_even), _rounds(f))
    facts.add_row("break-even length", *_even(model.break_even))
    facts.add_row(
        "acceptance rate", _percent(f.acceptance_rate), f"{_number(f.proposals_per_round, 2)} proposals a round"
    )
    facts.add_row(
        "throughput",
        f"{_number(f.tokens_per_second, 1)} tok/s",
        f"prompts {_number(f.prompt_tokens_per_second, 1)} tok/s",
    )
    facts.add_row("requests", f"{_number(f.running, 0)} running", f"{_number(f.waiting, 0)} waiting")
    facts.add_row("target cache", _percent(f.cache_usage), f"prefix hits {_percent(f.prefix_hit_ratio)}")
    for name, latency in (("first token", f.first_token), ("per token", f.per_token), ("whole request", f.end_to_end)):
        facts.add_row(name, *_latency(latency))
    parts.append(facts)
    if f.slots:
        slots = _table(("slot", "right"), ("accepted", "right"), ("of those before", "right"), ("", "left"))
        for slot, (share, own) in enumerate(zip(f.slots, f.conditional_slots, strict=True), 1):
            slots.add_row(str(slot), f"{share:.3f}", f"{own:.3f}", "█" * round(_BAR * min(max(share, 0.0), 1.0)))
        parts += [Text(), slots]
    if len(model.ranks) > 1:
        ranks = _table(("engine", "left"), ("rank", "left"), ("length", "right"), ("rate", "right"), ("tok/s", "right"),
                       ("running", "right"), ("waiting", "right"))  # fmt: skip
        for rank in model.ranks:
            r = rank.figures
            ranks.add_row(
                f"{rank.dialect} {rank.source}", rank.rank or "all", _number(r.acceptance_length, 2),
                _percent(r.acceptance_rate), _number(r.tokens_per_second, 1), _number(r.running, 0),
                _number(r.waiting, 0),
            )  # fmt: skip
        parts += [Text(), ranks]
    parts += [Text(f"note: {NOTES[note]}", "yellow") for note in f.notes]
    return parts


def _length(f: Figures, even: BreakEven | None) -> Text:
    if f.acceptance_length is None:
        return Text(_DASH)
    losing = even is not None and f.acceptance_length < even.length
    return Text(f"{f.acceptance_length:.3f}", "bold red" if losing else "bold green")


def _rounds(f: Figures) -> str:
    if f.basis == "none":
        return "no speculation in its metrics"
    return f"{f.rounds:,.0f} rounds" if f.rounds is not None else "the engine's own average"


def _even(even: BreakEven | None) -> tuple[str, str]:
    if even is None:
        return _DASH, "unknown: give --plain URL or --plain-step-ms"
    words = [BASES[even.basis]]
    if even.round_seconds and even.plain_seconds:
        words.append(f"round {even.round_seconds * 1e3:.1f} ms, plain step {even.plain_seconds * 1e3:.1f} ms")
    if even.speed_up is not None and even.basis != "bound":
        words.append(f"{even.speed_up:.2f}× plain decoding")
    return f"{even.length:.3f}", ", ".join(words)


def _latency(latency: Latency | None) -> tuple[str, str]:
    if latency is None:
        return _DASH, ""
    rest = [f"p{share} {_ms(value)}" for share, value in ((50, latency.p50), (90, latency.p90), (99, latency.p99))]
    return _ms(latency.mean), ", ".join(rest)


def _devices(devices: tuple[Device, ...]) -> Any:
    table = _table(("device", "left"), ("name", "left"), ("busy", "right"), ("memory", "right"), ("power", "right"),
                   ("°C", "right"), ("health", "left"))  # fmt: skip
    for device in devices:
        health = {True: Text("ok", "green"), False: Text("FAULT", "bold red"), None: Text(_DASH)}[device.healthy]
        table.add_row(
            f"{device.source} {device.id}", device.name, _percent(device.utilisation), _memory(device),
            f"{device.power_watts:.0f} W" if device.power_watts is not None else _DASH,
            _number(device.temperature_celsius, 0), health,
        )  # fmt: skip
    return table


def _memory(device: Device) -> str:
    if device.memory_used_bytes is None:
        return _DASH
    whole = f" / {device.memory_total_bytes / 2**30:.1f}" if device.memory_total_bytes else ""
    return f"{device.memory_used_bytes / 2**30:.1f}{whole} GiB"


def _sources(sources: tuple[SourceView, ...]) -> Any:
    table = _table(("source", "left"), ("what", "left"), ("state", "left"))
    for source in sources:
        state = Text("up", "green") if source.up else Text(f"DOWN: {source.fault}", "bold red")
        if source.up and source.fault:
            state = Text(source.fault, "yellow")
        for count, words in ((source.failures, "scrapes failed"), (source.resets, "restarts seen")):
            if count:
                state.append(f", {count} {words}", "yellow")
        for name in source.missing:
            state.append(f"\nmissing: {name}", "yellow")
        if source.note:
            state.append(f"\n{source.note}", "yellow")
        table.add_row(source.source, f"{source.kind or '?'} {source.version}".strip(), state)
    return table


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return _DASH if value is None else f"{value:.1%}"


def _ms(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
