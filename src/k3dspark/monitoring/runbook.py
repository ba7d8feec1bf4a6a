"""The runbook that alerts point to: what each means, what to look at first, and causes with the test that decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3dspark.monitoring.alerts import Alert


@dataclass(frozen=True)
class Entry:
    """`causes` are (cause, test that decides), the likeliest first."""

    meaning: str
    first: str
    causes: tuple[tuple[str, str], ...]


def markdown(rules: Iterable[Alert], entries: Mapping[str, Entry], label: Mapping[str, str]) -> str:
    """The runbook of these alerts. Headings are the alerts' names, so that links from annotations work."""
    parts = [f"# {label['title']}\n\n{label['intro']}\n"]
    for alert in rules:
        entry = entries[alert.name]
        causes = "".join(f"| {cause} | {test} |\n" for cause, test in entry.causes)
        parts.append(
            f"\n## {alert.name}\n\n"
            f"{label['severity']}: {label[alert.severity]} · {label['wait']}: {alert.wait}\n\n"
            f"{entry.meaning}\n\n"
            f"**{label['first']}** {entry.first}\n\n"
            f"| {label['cause']} | {label['test']} |\n|---|---|\n{causes}\n"
            f"```promql\n{alert.expr}\n```\n"
        )
    return "".join(parts)
