"""The HTML report of `k3dspark plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3dspark.page import Page

if TYPE_CHECKING:
    from k3dspark.deploy.engines import Hazard
    from k3dspark.deploy.memory import MemoryPlan


def memory_page(memory: MemoryPlan, name: str, warnings: Sequence[Hazard] = ()) -> Page:
    """Tables and charts of a memory plan."""
    wish = memory.wish
    page = Page("Memory of the draft", f"{name}; weights {wish.dtype}, cache {wish.cache_dtype}")
    page.text(
        f"Weights {memory.weights / 1e9:.2f} GB on each of {wish.tensor_parallel} devices, {memory.row_bytes:,} bytes "
        f"a cached token, {memory.row_bytes * memory.largest_context / 1e9:.2f} GB at {memory.largest_context:,}."
    )
    page.heading("Context × concurrency")
    page.figure(_bars(memory), 420)
    page.table(
        ["context", "sequences", "weights GB", "cache", "workspace", "overhead", "total", "smallest device"],
        [
            [f"{cell.context:,}", cell.sequences, *(f"{part / 1e9:.2f}" for part in (
                cell.weights, cell.cache, cell.workspace, cell.overhead, cell.total)),
             f"{cell.device_gb} GB" if cell.device_gb else "none"]
            for cell in memory.cells
        ],
    )  # fmt: skip
    page.heading("What a device holds")
    page.table(
        ["device", "tokens in all", *(f"sequences of {context:,}" for context, _ in memory.rooms[0].sequences)],
        [[f"{room.device_gb} GB", f"{room.tokens:,}", *(n for _, n in room.sequences)] for room in memory.rooms],
    )
    page.heading("Splitting the draft")
    page.table(
        ["tensor parallel", "weights GB a device", ""],
        [[split.tensor_parallel, f"{split.weights / 1e9:.2f}", split.why] for split in memory.splits],
        text_columns=[2],
    )
    if memory.joining:
        page.heading("Joined to Kimi K3's cache groups in vLLM")
        page.text(
            f"One sequence, on each of {wish.target_tensor_parallel} devices; latent rows are whole on each.",
            "dim",
        )
        page.figure(_joining(memory))
        page.table(
            ["context", "Kimi K3 alone GB", "with the draft", "the draft's rows", "padding and rollback states"],
            [
                [f"{cost.tokens:,}", *(f"{n / 1e9:.2f}" for n in (cost.alone, cost.joined, cost.rows, cost.padding))]
                for cost in memory.joining
            ],
        )
    if warnings:
        page.heading("Known faults of this engine")
        page.table(
            ["fault", "remedy", "source"],
            [[warning.what, warning.remedy, warning.source] for warning in warnings],
            text_columns=[0, 1],
        )
    page.text(
        f"Assumed: {wish.overhead.bytes(wish.tensor_parallel) / 1e9:.2f} GB for driver, graphs and link buffers; "
        f"{wish.utilisation:.0%} of a device usable.",
        "dim",
    )
    return page


def _bars(memory: MemoryPlan) -> Any:
    import plotly.graph_objects as go

    labels = [f"{cell.sequences} × {cell.context:,}" for cell in memory.cells]
    figure = go.Figure()
    for part in ("weights", "cache", "workspace", "overhead"):
        figure.add_bar(name=part, x=labels, y=[getattr(cell, part) / 1e9 for cell in memory.cells])
    for room in memory.rooms:
        figure.add_hline(y=room.usable / 1e9, line_dash="dot", annotation_text=f"{room.device_gb} GB device")
    top = max(room.usable for room in memory.rooms) / 1e9
    figure.update_layout(
        barmode="stack", title="GB on one device", yaxis={"range": [0, 1.25 * top], "title": "GB"},
        xaxis={"title": "sequences × context"},
    )  # fmt: skip
    return figure


def _joining(memory: MemoryPlan) -> Any:
    import plotly.graph_objects as go

    contexts = [f"{cost.tokens:,}" for cost in memory.joining]
    figure = go.Figure()
    for name, part in (("Kimi K3 alone", "alone"), ("the draft's rows", "rows"), ("padding and states", "padding")):
        figure.add_bar(name=name, x=contexts, y=[getattr(cost, part) / 1e9 for cost in memory.joining])
    figure.update_layout(barmode="stack", title="GB of cache for one sequence", xaxis={"title": "context"})
    return figure
