"""What a monitor shows at one moment, as plain data, and as the JSON that `--json` prints (docs/monitor.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from k3dspark.monitoring.break_even import BreakEven
from k3dspark.monitoring.devices import Device
from k3dspark.monitoring.figures import Figures

FORMAT: Final = 1


@dataclass(frozen=True)
class SourceView:
    """One address. `kind` is the engine or exporter behind it, "" while unknown; `up` is about the last scrape."""

    source: str
    kind: str
    up: bool
    fault: str
    version: str
    note: str
    failures: int
    resets: int
    missing: tuple[str, ...]
    last_seen: float | None


@dataclass(frozen=True)
class RankView:
    source: str
    dialect: str
    rank: str
    figures: Figures


@dataclass(frozen=True)
class ModelView:
    """Everything that serves one model name, together and rank by rank."""

    model: str
    whole: Figures
    ranks: tuple[RankView, ...]
    break_even: BreakEven | None


@dataclass(frozen=True)
class Snapshot:
    time: float
    models: tuple[ModelView, ...]
    devices: tuple[Device, ...]
    sources: tuple[SourceView, ...]


def figures_document(figures: Figures) -> dict[str, Any]:
    return {
        **asdict(figures),
        "slots": list(figures.slots),
        "conditional_slots": list(figures.conditional_slots),
        "notes": list(figures.notes),
    }


def document(snapshot: Snapshot) -> dict[str, Any]:
    """The JSON of a snapshot; every number is finite."""
    return _finite(
        {
            "format": FORMAT,
            "time": snapshot.time,
            "models": [
                {
                    "model": model.model,
                    **figures_document(model.whole),
                    "break_even": None
                    if model.break_even is None
                    else {**asdict(model.break_even), "speed_up": model.break_even.speed_up},
                    "ranks": [
                        {"source": r.source, "engine": r.dialect, "rank": r.rank, **figures_document(r.figures)}
                        for r in model.ranks
                    ],
                }
                for model in snapshot.models
            ],
            "devices": [asdict(device) for device in snapshot.devices],
            "sources": [{**asdict(source), "missing": list(source.missing)} for source in snapshot.sources],
        }
    )


def _finite(value: Any) -> Any:
    """Infinities, which an exposition may hold, as null: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
