"""A Grafana dashboard over the recorded names. It asks for a Prometheus data source and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from k3dspark.monitoring.rules import Deployment

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_MODEL: Final = '{service="$service", model_name=~"$model"}'


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    width: int = 12
    kind: str = "timeseries"


def dashboard(deployment: Deployment) -> dict[str, Any]:
    """The dashboard as Grafana imports it (schema version 39)."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(_panels(deployment), 1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        panels.append(_panel(panel, number, x, y))
        x += panel.width
    return {
        "title": f"DSpark: {deployment.service}",
        "uid": "k3dspark",
        "tags": ["dspark", "speculative-decoding"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                _variable("service", "label_values(dspark:tokens_per_second:5m, service)", False),
                _variable("model", 'label_values(dspark:tokens_per_second:5m{service="$service"}, model_name)', True),
            ]
        },
        "panels": panels,
    }


def _panels(deployment: Deployment) -> list[_Panel]:
    length = [
        (f"dspark:acceptance_length:5m{_MODEL}", "{{model_name}}"),
        (f"dspark:expected_length{_MODEL}", "expected"),
    ]
    if deployment.plain_step_seconds is not None:
        length.append((f"dspark:break_even_length:5m{_MODEL}", "break-even"))
    return [
        _Panel("Acceptance length", "none", length),
        _Panel("Acceptance by slot", "percentunit", [(f"dspark:slot_acceptance:5m{_MODEL}", "slot {{position}} + 1")]),
        _Panel("Acceptance rate", "percentunit", [(f"dspark:acceptance_rate:5m{_MODEL}", "{{model_name}}")]),
        _Panel(
            "Acceptance length by rank", "none",
            [(f"dspark:rank_acceptance_length:5m{_MODEL}", "{{instance}} {{rank}}")],
        ),
        _Panel("Tokens a second", "none", [(f"dspark:tokens_per_second:5m{_MODEL}", "{{model_name}}")]),
        _Panel(
            "Requests", "none",
            [(f"dspark:requests_running{_MODEL}", "running"), (f"dspark:requests_waiting{_MODEL}", "waiting")],
        ),
        _Panel(
            "Latency, 90th percentile", "s",
            [
                (f"dspark:first_token_seconds:p90_5m{_MODEL}", "first token"),
                (f"dspark:request_seconds:p90_5m{_MODEL}", "whole request"),
            ],
        ),
        _Panel("Seconds a round", "s", [(f"dspark:round_seconds:5m{_MODEL}", "{{model_name}}")]),
        _Panel("Device utilisation", "percentunit", [('dspark:device_utilisation{service="$service"}', "average")]),
        _Panel(
            "Alerts", "none", [('ALERTS{alertstate="firing", alertname=~"DSpark.*"}', "{{alertname}} {{model_name}}")],
            kind="table",
        ),
    ]  # fmt: skip


def _panel(panel: _Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": panel.kind == "table",
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, query: str, every: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": every,
        "multi": every,
        "allValue": ".*" if every else None,
    }
