"""A report opens without a network and shows text as text."""

from __future__ import annotations

import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from k3dspark.errors import BadInput
from k3dspark.page import Page


def small_page() -> Page:
    page = Page("Reliability <of> a draft", "two slots")
    page.heading("Slots")
    rows = [[1, "0.013", "<script>alert(1)</script>"], [2, "0.02", "fine"]]
    page.table(["slot", "ECE", "note"], rows, text_columns=[2])
    page.figure(go.Figure(go.Scatter(x=[0, 1], y=[0, 1])))
    page.figure(go.Figure(go.Bar(x=["a"], y=[1])))
    return page


def test_nothing_is_fetched_and_the_plot_library_is_carried_once() -> None:
    html = small_page().html()
    assert not re.search(r"""<(?:script|link|img)[^>]*(?:src|href)=""", html)
    assert html.count("plotly.js v") == 1
    assert html.count("Plotly.newPlot(") >= 2


def test_text_from_data_is_escaped() -> None:
    html = small_page().html()
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "<title>Reliability &lt;of&gt; a draft</title>" in html


def test_an_unwritable_place_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput):
        small_page().write(tmp_path / "file" / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
