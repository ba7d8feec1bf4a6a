"""Self-contained HTML reports: headings, tables and plotly figures in one file that opens without a network.

The door is `Page`: add parts in reading order, then `write` it. Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from k3dspark.checkpoint.files import replacing
from k3dspark.errors import BadInput

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --paper: #ffffff; --line: #d9dee5; --card: #f6f8fa;
  --good: #1a7f4b; --warn: #9a6700; --bad: #c0272d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #98a4b3; --paper: #12161c; --line: #2c3440;
  --card: #1a2029; --good: #4cc38a; --warn: #e2a336; --bad: #ff6b6b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1.5rem; max-width: 68rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { max-width: 48rem; } .dim { color: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 600; }
td.text { white-space: normal; text-align: left; }
pre { background: var(--card); padding: .8rem; overflow-x: auto; border-radius: .4rem; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.figure { background: var(--card); border-radius: .4rem; padding: .4rem; margin: .6rem 0; }
"""

# Figures are drawn on nothing and take the colours of the page, also when the reader switches.
_SCRIPT = """
function paint() {
  const css = getComputedStyle(document.documentElement), ink = css.getPropertyValue('--ink').trim(),
    line = css.getPropertyValue('--line').trim();
  document.querySelectorAll('.js-plotly-plot').forEach(plot => {
    const update = {'font.color': ink, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)'};
    Object.keys(plot.layout).filter(key => /^[xy]axis/.test(key)).forEach(axis => {
      for (const part of ['gridcolor', 'zerolinecolor', 'linecolor']) update[axis + '.' + part] = line; });
    Plotly.relayout(plot, update); });
}
window.addEventListener('load', paint);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
"""


class Page:
    """One report. Every text is escaped; nothing is fetched when the page is opened."""

    def __init__(self, title: str, subtitle: str = "", lang: str = "en") -> None:
        self.title, self.subtitle, self.lang = title, subtitle, lang
        self._parts: list[str] = []
        self._figures = 0

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, tone: str = "") -> None:
        """A paragraph; `tone` is "", "dim", "good", "warn" or "bad"."""
        self._parts.append(f'<p class="{escape(tone)}">{escape(text)}</p>')

    def code(self, text: str) -> None:
        """Preformatted lines: a command, a log, a configuration."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], text_columns: Sequence[int] = ()) -> None:
        """A table; the first column is left-aligned, `text_columns` hold prose that may wrap, the rest are numbers."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>"
            + "".join(
                f'<td class="text">{escape(str(cell))}</td>' if i in text_columns else f"<td>{escape(str(cell))}</td>"
                for i, cell in enumerate(row)
            )
            + "</tr>"
            for row in rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._parts.append(f'<div class="scroll">{table}</div>')

    def figure(self, figure: Figure, height: int = 360) -> None:
        """A plotly figure, as wide as the page."""
        figure.update_layout(height=height, margin={"l": 50, "r": 20, "t": 40, "b": 45})
        html = figure.to_html(
            full_html=False, include_plotlyjs=self._figures == 0, config={"responsive": True, "displaylogo": False}
        )
        self._figures += 1
        self._parts.append(f'<div class="figure">{html}</div>')

    def html(self) -> str:
        """The whole document."""
        subtitle = f'<p class="dim">{escape(self.subtitle)}</p>' if self.subtitle else ""
        script = f"<script>{_SCRIPT}</script>" if self._figures else ""
        return (
            f'<!doctype html><html lang="{escape(self.lang)}"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(self.title)}</title>'
            f"<style>{_STYLE}</style></head><body><h1>{escape(self.title)}</h1>{subtitle}{''.join(self._parts)}"
            f"{script}</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page whole or not at all. Raises `BadInput` when the place cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(self.html().encode())
        except OSError as error:
            raise BadInput(f"cannot write {path}", str(error), "choose another place for the report") from error
