"""The metrics of a training run: reading metrics.jsonl, and the HTML page of curves beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go

from k3dspark.page import Page

METRICS_FILE: Final = "metrics.jsonl"
PAGE_FILE: Final = "training.html"

Metrics = list[dict[str, Any]]


def read_metrics(out: Path) -> Metrics:
    """All whole lines of metrics.jsonl in order; a line that a kill has torn is left out."""
    path = out / METRICS_FILE
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
            found.append(metrics)
    return found


def series(metrics: Metrics, field: str) -> tuple[list[int], list[Any]]:
    """Steps and values of a field. A step run again after a kill counts once, as it was run last."""
    values = {m["step"]: m[field] for m in metrics if field in m}
    return sorted(values), [values[step] for step in sorted(values)]


def write_curves(out: Path) -> Path:
    """Write OUT/training.html anew from OUT/metrics.jsonl. Raises `BadInput` when it cannot be written."""
    page = training_page(read_metrics(out), out.resolve().name)
    page.write(out / PAGE_FILE)
    return out / PAGE_FILE


def training_page(metrics: Metrics, name: str) -> Page:
    """Evaluation, loss, first slot, learning rate and speed over the steps."""
    last: dict[str, Any] = {}
    for line in metrics:
        last |= line
    page = Page(f"Training of {name}", f"{last.get('step', 0):,} steps")
    if not last:
        page.text("Nothing has been recorded yet.", "dim")
        return page
    page.table(["last figure", "value"], _summary(last))
    if "eval_acceptance_length" in last:
        page.heading("Acceptance length on conversations held out")
        page.text("Greedy rounds replayed on recorded answers; tokens per target pass, bonus included.", "dim")
        page.figure(_figure(metrics, [("eval_acceptance_length", "acceptance length")], markers=True))
        page.figure(_slots(metrics, "eval_per_slot", "share of rounds that accepted slot k"))
    if "loss" in last:
        page.heading("Training")
        parts = [("loss", "loss"), ("ce", "cross-entropy"), ("l1", "‖q − p‖₁"), ("confidence", "confidence")]
        page.figure(_figure(metrics, parts, title="loss and its unweighted parts"))
        page.figure(_slots(metrics, "matches", "slot k right, teacher-forced"))
        page.figure(_figure(metrics, [("learning_rate", "learning rate")], title="learning rate"), 260)
        page.figure(_figure(metrics, [("slots_per_second", "slots a second")], title="slots a second"), 260)
    return page


def _summary(last: dict[str, Any]) -> list[list[str]]:
    rows = [
        ("acceptance length", f"{last['eval_acceptance_length']:.3f}" if "eval_acceptance_length" in last else None),
        ("loss", f"{last['loss']:.4f}" if "loss" in last else None),
        ("first slot right", f"{last['matches'][0]:.1%}" if last.get("matches") else None),
        ("learning rate", f"{last['learning_rate']:.2e}" if "learning_rate" in last else None),
        ("slots a second", f"{last['slots_per_second']:,.0f}" if "slots_per_second" in last else None),
    ]
    return [[name, value] for name, value in rows if value is not None]


def _figure(metrics: Metrics, fields: Sequence[tuple[str, str]], title: str = "", markers: bool = False) -> go.Figure:
    figure = go.Figure()
    for field, name in fields:
        steps, values = series(metrics, field)
        figure.add_scatter(x=steps, y=values, name=name, mode="lines+markers" if markers else "lines")
    figure.update_layout(title=title, xaxis={"title": "step"})
    return figure


def _slots(metrics: Metrics, field: str, title: str) -> go.Figure:
    figure = go.Figure()
    steps, values = series(metrics, field)
    for slot in range(max((len(v) for v in values), default=0)):
        line = [(s, v[slot]) for s, v in zip(steps, values, strict=True) if slot < len(v)]
        figure.add_scatter(x=[s for s, _ in line], y=[y for _, y in line], name=f"slot {slot + 1}", mode="lines")
    figure.update_layout(title=title, xaxis={"title": "step"}, yaxis={"tickformat": ".0%", "rangemode": "tozero"})
    return figure
