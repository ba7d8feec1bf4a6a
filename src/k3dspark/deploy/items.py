"""One line of the checklist: a status, and a message that can be said in each language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Status = Literal["pass", "warn", "fail", "na"]
Language = Literal["en", "zh"]

SECTIONS: Final = ("draft", "target", "device", "software", "host", "nodes", "links", "ops")
FORMAT: Final = 1


@dataclass(frozen=True)
class Item:
    """One check. `id` is stable; `message` names a text of `wording_en` and `wording_zh`, filled from `values`."""

    id: str
    status: Status
    message: str
    values: Mapping[str, object] = field(default_factory=dict)
    subject: str = ""

    @property
    def section(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Worded:
    """An item as a person reads it; `remedy` is empty where there is nothing to do."""

    item: Item
    title: str
    evidence: str
    remedy: str


def word(item: Item, language: Language) -> Worded:
    """Say an item in a language."""
    if language == "zh":
        from k3dspark.deploy.wording_zh import MESSAGES, TITLES
    else:
        from k3dspark.deploy.wording_en import MESSAGES, TITLES

    evidence, remedy = MESSAGES[item.message]
    title = TITLES[item.id] + (f" · {item.subject}" if item.subject else "")
    return Worded(item, title, evidence.format_map(item.values), remedy.format_map(item.values))


def counts(items: Iterable[Item]) -> dict[Status, int]:
    """How many items have each status."""
    result: dict[Status, int] = {"pass": 0, "warn": 0, "fail": 0, "na": 0}
    for item in items:
        result[item.status] += 1
    return result


def as_json(items: Iterable[Item], language: Language) -> dict[str, Any]:
    """The stable JSON of `k3dspark check --json` (docs/check.md), less what the command adds."""
    items = tuple(items)
    return {
        "format": FORMAT,
        "passed": not any(item.status == "fail" for item in items),
        "counts": counts(items),
        "items": [
            {
                "id": worded.item.id,
                "status": worded.item.status,
                "subject": worded.item.subject,
                "title": worded.title,
                "evidence": worded.evidence,
                "remedy": worded.remedy,
            }
            for worded in (word(item, language) for item in items)
        ],
    }
