"""The HTML report of `k3dspark evaluate`: acceptance by domain and slot, and what the confidence head is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from k3dspark.page import Page


def evaluation_page(record: Mapping[str, Any]) -> Page:
    """A page from the record that `--json` prints."""
    page = Page(
        f"Acceptance of {record['draft']}",
        f"target {record['target']}, {record['dtype']}, block of {record['block_size']}, at most "
        f"{record['max_new_tokens']} new tokens, verifier {record['verifier']}, seed {record['seed']}",
    )
    page.text(
        "Acceptance length: tokens committed per target pass, the bonus token included and the first token of an "
        "answer excluded; counters are pooled over prompts. The interval is a 95 % bootstrap over prompts.",
        "dim",
    )
    page.figure(_lengths(record["settings"]), 380)
    for setting in record["settings"]:
        _setting(page, setting)
    return page


def temperature_name(temperature: float) -> str:
    """How tables and figures call a sampling setting."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _setting(page: Page, setting: Mapping[str, Any]) -> None:
    groups: Mapping[str, Any] = setting["groups"]
    page.heading(temperature_name(setting["temperature"]).capitalize())
    page.table(
        ["domain", "prompts", "rounds", "acceptance length", "95 % interval", "acceptance rate"],
        [
            [
                name, g["prompts"], f"{g['rounds']:,}", f"{g['acceptance_length']:.3f}",
                "{:.2f} – {:.2f}".format(*g["acceptance_length_interval"]), f"{g['acceptance_rate']:.1%}",
            ]
            for name, g in groups.items()
        ],
    )  # fmt: skip
    page.figure(_slots(groups, "per_slot_acceptance", "slot k accepted, of all rounds"))
    page.figure(_slots(groups, "conditional_acceptance", "slot k accepted, where slot k − 1 was"))
    whole = groups["all"]
    if whole["confidence"] is None:
        page.text("This draft has no confidence head.", "dim")
        return
    page.text(
        "Confidence as the draft gives it, without calibration. Conditional: one slot's confidence against its "
        "acceptance, where all slots before it were accepted. Survival: the product up to a slot against “at least so "
        "many accepted”; schedulers decide by it."
    )
    kinds = ("conditional", "survival")
    for kind in kinds:
        page.table(
            [f"{kind}: slot", "observed", "predicted", "happened", "ECE", "AUROC", "Brier"],
            reliability_rows(whole["confidence"][kind]),
        )
    page.figure(_reliability({kind: whole["confidence"][kind]["curve"] for kind in kinds}), 420)


def reliability_rows(kind: Mapping[str, Any]) -> list[list[str]]:
    """Rows of one kind of confidence: every slot, then all of them."""
    named = [*((str(slot), figures) for slot, figures in enumerate(kind["per_slot"], 1)), ("all", kind["all"])]
    return [
        [
            name, f"{f['count']:,}", f"{f['mean_predicted']:.3f}", f"{f['mean_outcome']:.3f}", f"{f['ece']:.3f}",
            "–" if f["auroc"] is None else f"{f['auroc']:.3f}", f"{f['brier']:.3f}",
        ]
        for name, f in named
        if f is not None
    ]  # fmt: skip


def _lengths(settings: Sequence[Mapping[str, Any]]) -> go.Figure:
    figure = go.Figure()
    for setting in settings:
        groups = setting["groups"]
        lengths = [g["acceptance_length"] for g in groups.values()]
        low, high = zip(*(g["acceptance_length_interval"] for g in groups.values()), strict=True)
        figure.add_bar(
            x=list(groups),
            y=lengths,
            name=temperature_name(setting["temperature"]),
            text=[f"{length:.2f}" for length in lengths],
            textposition="inside",
            insidetextanchor="start",
            error_y={
                "array": [max(h - x, 0) for h, x in zip(high, lengths, strict=True)],
                "arrayminus": [max(x - b, 0) for b, x in zip(low, lengths, strict=True)],
            },
        )
    figure.update_layout(
        title="Acceptance length by domain", barmode="group", yaxis={"title": "tokens per target pass"}
    )
    return figure


def _slots(groups: Mapping[str, Any], field: str, title: str) -> go.Figure:
    figure = go.Figure()
    for name, group in groups.items():
        values = group[field]
        figure.add_scatter(
            x=list(range(1, len(values) + 1)),
            y=values,
            name=name,
            mode="lines+markers",
            line={"width": 3 if name == "all" else 1.5},
        )
    figure.update_layout(
        title=title.capitalize(), xaxis={"title": "slot", "dtick": 1}, yaxis={"range": [0, 1], "tickformat": ".0%"}
    )
    return figure


def _reliability(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line={"dash": "dot"}, name="perfectly calibrated")
    for name, curve in curves.items():
        figure.add_scatter(
            x=[b["predicted"] for b in curve],
            y=[b["observed"] for b in curve],
            name=name,
            mode="lines+markers",
            customdata=[b["count"] for b in curve],
            hovertemplate="predicted %{x:.3f}<br>happened %{y:.3f}<br>%{customdata:,} times",
        )
    figure.update_layout(
        title="Reliability of the confidence",
        xaxis={"title": "predicted", "range": [0, 1]},
        yaxis={"title": "happened", "range": [0, 1]},
    )
    return figure
