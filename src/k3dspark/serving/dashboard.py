"""The dashboard's page, which lives beside this file and needs nothing but /metrics."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def dashboard_page() -> bytes:
    """One self-contained HTML document."""
    return (Path(__file__).parent / "dashboard.html").read_bytes()
