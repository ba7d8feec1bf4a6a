"""Everything that a Prometheus and a Grafana need to watch a deployment, written as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import replacing
from k3dspark.errors import BadInput
from k3dspark.monitoring import runbook_en, runbook_zh, yamltext
from k3dspark.monitoring.alerts import ENGINES_JOB, alerts
from k3dspark.monitoring.dashboard import dashboard
from k3dspark.monitoring.rules import Deployment, recordings
from k3dspark.monitoring.runbook import markdown

RECORDING_FILE: Final = "dspark-recording.rules.yml"
ALERT_FILE: Final = "dspark-alerts.rules.yml"
_HEAD: Final = "# Written by `k3dspark monitor export`; docs/monitor.md explains every name.\n"

__all__ = ["Deployment", "files", "write"]


def write(directory: Path, deployment: Deployment) -> list[Path]:
    """Write all files, each whole or not at all. Raises `BadInput` when the place is taken or cannot be written."""
    _refuse(deployment)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        texts = files(deployment)
        foreign = {path.name for path in directory.iterdir()} - texts.keys()
        if foreign:
            raise BadInput(
                f"{directory} is not empty", f"it holds {min(foreign)}", "choose a directory that is empty or new"
            )
        for name, text in texts.items():
            with replacing(directory / name) as file:
                file.write(text.encode())
    except OSError as error:
        raise BadInput(f"cannot write {directory}", str(error), "choose another --out") from error
    return [directory / name for name in texts]


def files(deployment: Deployment) -> dict[str, str]:
    """The files by name."""
    recording = [
        {"record": rule.record, "expr": rule.expr, **({"labels": rule.labels} if rule.labels else {})}
        for rule in recordings(deployment)
    ]
    alerting = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "meaning": runbook_en.ENTRIES[alert.name].meaning,
                "meaning_zh": runbook_zh.ENTRIES[alert.name].meaning,
                "runbook": f"RUNBOOK.md#{alert.name.lower()}",
            },
        }
        for alert in alerts(deployment)
    ]
    return {
        "prometheus.yml": _HEAD + yamltext.dump(_configuration(deployment)),
        RECORDING_FILE: _HEAD + yamltext.dump({"groups": [{"name": "dspark", "interval": "30s", "rules": recording}]}),
        ALERT_FILE: _HEAD + yamltext.dump({"groups": [{"name": "dspark-alerts", "rules": alerting}]}),
        "dspark-dashboard.json": json.dumps(dashboard(deployment), indent=2) + "\n",
        "RUNBOOK.md": markdown(alerts(deployment), runbook_en.ENTRIES, runbook_en.LABELS),
        "RUNBOOK.zh-CN.md": markdown(alerts(deployment), runbook_zh.ENTRIES, runbook_zh.LABELS),
    }


def _configuration(deployment: Deployment) -> dict[str, Any]:
    jobs = (
        (ENGINES_JOB, deployment.engines),
        ("dspark-npu", deployment.npu_exporters),
        ("dspark-dcgm", deployment.dcgm_exporters),
    )
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "30s"},
        "rule_files": [RECORDING_FILE, ALERT_FILE],
        "scrape_configs": [
            {
                "job_name": name,
                "metrics_path": "/metrics",
                "static_configs": [{"targets": list(targets), "labels": {"service": deployment.service}}],
            }
            for name, targets in jobs
            if targets
        ],
    }


def _refuse(deployment: Deployment) -> None:
    for target in (*deployment.engines, *deployment.npu_exporters, *deployment.dcgm_exporters):
        if "/" in target or not target.strip():
            raise BadInput(
                f"{target!r} is no scrape target",
                "Prometheus takes HOST:PORT, without a scheme or path",
                "write HOST:PORT",
            )
    if _bad(deployment.service):
        raise BadInput(f"{deployment.service!r} is no name of a service", "it becomes a label", "use a plain word")


def _bad(text: str) -> bool:
    unwanted: Iterable[str] = '"\\{}\n'
    return not text.strip() or any(char in text for char in unwanted)
