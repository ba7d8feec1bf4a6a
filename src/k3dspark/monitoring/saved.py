"""Figures from files: scrapes that somebody saved, and recordings of `monitor --json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from k3dspark.errors import BadInput
from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.monitor import Costs, Monitor
from k3dspark.monitoring.scrape import Scrape
from k3dspark.monitoring.snapshot import FORMAT, Snapshot


def of_scrapes(texts: Sequence[str], names: Sequence[str], plain_seconds: float | None = None) -> Snapshot:
    """One scrape covers everything since the engine started, two what happened between them.

    When they were taken is not in them, so there are counts and ratios but no rates. Raises `BadInput` for more than
    two, for text that is no exposition, and for one without an engine.
    """
    if not 1 <= len(texts) <= 2:
        raise BadInput(
            f"{len(texts)} files of metrics", "one or two scrapes can be compared", "give the first and last"
        )
    monitor = Monitor([names[0]], costs=Costs(plain_seconds), since_start=len(texts) == 1)
    for text, name in zip(texts, names, strict=True):
        monitor.feed([Scrape(names[0], 0.0, parse(text, where=name))])
    snapshot = monitor.snapshot()
    if not snapshot.models:
        raise BadInput(
            f"{names[0]} shows no engine", "it has no family of vLLM, SGLang, TokenSpeed or k3dspark",
            "save the engine's own /metrics",
        )  # fmt: skip
    return snapshot


def recording(text: str, name: str) -> list[dict[str, Any]]:
    """The documents of a recording, one a line or one in all. A last line cut off in writing is left out."""
    try:
        whole = json.loads(text)
        return [_document(whole, name)]
    except ValueError:
        pass
    lines = [line for line in text.splitlines() if line.strip()]
    documents = []
    for number, line in enumerate(lines, 1):
        try:
            documents.append(_document(json.loads(line), name))
        except ValueError as error:
            if number == len(lines) and documents:
                break
            raise BadInput(
                f"{name}, line {number}, is no JSON", str(error)[:200], "record it with k3dspark monitor URL --json"
            ) from error
    return documents


def _document(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("format") != FORMAT or "models" not in value:
        raise BadInput(f"{name} is no recording", "it is not what monitor --json prints", "record it again")
    return value
