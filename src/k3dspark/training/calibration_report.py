"""The reliability of a draft's confidence before and after calibration, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from k3dspark.decoding.calibration import UNCHANGED
from k3dspark.decoding.schedule import acceptance
from k3dspark.page import Page
from k3dspark.training.calibrate import Fitted
from k3dspark.training.reliability import Reliability, reliability_curve

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BEFORE, AFTER, PERFECT = "#d97706", "#2f81f7", "#8b949e"
COLUMNS = ("slot", "survived", "ECE", "floor", "AUROC", "Brier", "T", "shift")


def write_report(path: Path, draft: str, fitted: Sequence[Fitted]) -> None:
    """One section per sampling setting. Raises `BadInput` when the page cannot be written."""
    page = Page("Calibration of a draft's confidence", draft)
    page.text(
        "Every block was verified whole. Scaling was fitted on the rounds of half of the prompts; all that follows is "
        "measured on the other half. Survival of a slot: the chance that its token and all before it are accepted. "
        "Floor: the ECE that a perfectly calibrated head would show on so few rounds. Two figures are before→after."
    )
    for one in fitted:
        page.heading(one.setting.key)
        page.text(
            f"{len(one.fit_rounds):,} rounds to fit on, {len(one.test_rounds):,} to judge on "
            f"({len(np.unique(one.test_rounds.prompt))} prompts)."
        )
        page.table(COLUMNS, survival_rows(one))
        page.figure(_error_figure(one), height=280)
        page.figure(_curves(one), height=260 * -(-len(one.slots) // 4))
        page.text("Acceptance of a slot, over the rounds that accepted everything before it:")
        page.table(("slot", "rounds", *COLUMNS[1:3], *COLUMNS[4:6]), step_rows(one))
    page.write(path)


def survival_rows(one: Fitted) -> list[list[str]]:
    """A row of `COLUMNS` for every slot."""
    pairs = zip(one.slots, one.scaling.temperatures, one.scaling.shifts, strict=True)
    return [
        [
            str(slot), *_figures(figures.survival_before, figures.survival_after, figures.floor),
            f"{temperature:.2f}", f"{shift:+.2f}",
        ]
        for slot, (figures, temperature, shift) in enumerate(pairs, 1)
    ]  # fmt: skip


def step_rows(one: Fitted) -> list[list[str]]:
    """Slot, rounds, share accepted, and the figures of its own acceptance; no row where nothing got that far."""
    return [
        [str(slot), str(before.count), *_figures(before, after)]
        for slot, figures in enumerate(one.slots, 1)
        if (before := figures.step_before) is not None and (after := figures.step_after) is not None
    ]


def _figures(before: Reliability, after: Reliability, floor: float | None = None) -> list[str]:
    both = before.auroc is not None and after.auroc is not None
    return [
        f"{before.mean_outcome:.3f}",
        f"{before.ece:.3f}→{after.ece:.3f}",
        *([f"{floor:.3f}"] if floor is not None else []),
        f"{before.auroc:.3f}→{after.auroc:.3f}" if both else "—",
        f"{before.brier:.3f}→{after.brier:.3f}",
    ]


def _error_figure(one: Fitted) -> Figure:
    import plotly.graph_objects as go

    slots = [str(k + 1) for k in range(len(one.slots))]
    figure = go.Figure()
    for name, colour, values in (
        ("before", BEFORE, [s.survival_before.ece for s in one.slots]),
        ("after", AFTER, [s.survival_after.ece for s in one.slots]),
        ("floor", PERFECT, [s.floor for s in one.slots]),
    ):
        figure.add_trace(go.Bar(x=slots, y=values, name=name, marker_color=colour))
    figure.update_layout(title="Expected calibration error of survival", barmode="group")
    figure.update_xaxes(title="slot")
    return figure


def _curves(one: Fitted) -> Figure:
    """Reliability curves of survival, a panel per slot; the area of a point is its share of the rounds."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    count = len(one.slots)
    columns = min(count, 4)
    titles = [f"slot {k + 1}" for k in range(count)]
    figure = make_subplots(rows=-(-count // columns), cols=columns, subplot_titles=titles)
    rounds = one.test_rounds
    for name, colour, scaling in (("before", BEFORE, UNCHANGED), ("after", AFTER, one.scaling)):
        survival = acceptance(scaling(rounds.logits)).cumprod(1)
        for k in range(count):
            curve = reliability_curve(survival[:, k], rounds.survived(k))
            trace = go.Scatter(
                x=[b.predicted for b in curve],
                y=[b.observed for b in curve],
                text=[f"{b.count} rounds" for b in curve],
                mode="lines+markers",
                name=name,
                legendgroup=name,
                showlegend=k == 0,
                line_color=colour,
                marker_size=[4 + 16 * (b.count / len(rounds)) ** 0.5 for b in curve],
            )
            figure.add_trace(trace, row=k // columns + 1, col=k % columns + 1)
    for k in range(count):
        line = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": PERFECT, "dash": "dot"}, showlegend=False)
        figure.add_trace(line, row=k // columns + 1, col=k % columns + 1)
    figure.update_xaxes(range=[0, 1])
    figure.update_yaxes(range=[0, 1])
    figure.update_layout(title="Reliability of survival: predicted across, observed upwards")
    return figure
