"""The HTML report of `k3dspark tune`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3dspark.cli.tune import load_name
from k3dspark.page import Page

if TYPE_CHECKING:
    from k3dspark.deploy.tuning import Tuning


def tuning_page(tuning: Tuning, engine: str, option: Mapping[str, Any]) -> Page:
    """Tables and charts of a tuning."""
    cluster = tuning.cluster
    page = Page("Draft length by load", f"{cluster.replicas} replicas of up to {cluster.sequences} requests, simulated")
    page.heading("Throughput")
    page.figure(_chart(tuning, "tokens per second", lambda result: result.tokens_per_second), 420)
    names = [load_name(load) for load in tuning.loads]
    page.table(
        ["tokens/s", *names],
        [
            [result.policy, *(f"{load.results[index].tokens_per_second:,.1f}" for load in tuning.loads)]
            for index, result in enumerate(tuning.loads[0].results)
        ],
    )
    page.heading("Time per token of a request")
    page.figure(_chart(tuning, "ms per token", lambda result: 1000 * float(result.per_token.mean())), 420)
    page.heading("Where drafting begins to pay")
    page.text("Acceptance length at which a draft length is as fast as no draft, beside the length that it reaches.")
    slots = range(1, len(tuning.loads[0].break_even) + 1)
    page.table(
        ["draft tokens", "reached", *(f"needed at {name}" for name in names)],
        [
            [k, f"{tuning.profile.length(k):.2f}", *(f"{load.break_even[k - 1][1]:.2f}" for load in tuning.loads)]
            for k in slots
        ],
    )
    page.heading("For the engine")
    page.table(["batch size", "draft tokens"], [[f"{start}–{end}", length] for start, end, length in tuning.table])
    page.code(f"{engine}: {json.dumps(dict(option))}")
    return page


def _chart(tuning: Tuning, title: str, value: Any) -> Any:
    import plotly.graph_objects as go

    names = [load_name(load) for load in tuning.loads]
    figure = go.Figure()
    for index, first in enumerate(tuning.loads[0].results):
        fixed = first.policy.startswith("fixed")
        figure.add_scatter(
            name=first.policy,
            x=names,
            y=[value(load.results[index]) for load in tuning.loads],
            mode="lines+markers",
            line={"dash": "dot" if fixed else "solid", "width": 1.5 if fixed else 3},
        )
    figure.update_layout(title=title, xaxis={"title": "load", "type": "category"}, yaxis={"title": title})
    return figure
