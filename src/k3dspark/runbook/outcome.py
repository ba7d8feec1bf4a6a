"""What a step found: a verdict, facts that can be compared between nodes, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skip"]
Fact = str | int | float | bool | None


@dataclass(frozen=True)
class Outcome:
    """`facts` are compared by `diff`; `figures` (times, loads) belong to one run and are not."""

    status: Status
    summary: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    figures: Mapping[str, Fact] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "advice": list(self.advice)}

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> Outcome:
        """Raises KeyError or TypeError when a field is missing."""
        return cls(
            entry["status"], entry["summary"], dict(entry["facts"]), tuple(entry["advice"]), dict(entry["figures"])
        )


def flat(value: object, name: str) -> dict[str, Fact]:
    """A JSON value as facts: objects by dotted names, lists as they would be written."""
    if isinstance(value, Mapping):
        return {key: fact for inner, item in value.items() for key, fact in flat(item, f"{name}.{inner}").items()}
    if isinstance(value, list | tuple):
        return {name: ", ".join(str(item) for item in value)}
    return {name: value if isinstance(value, str | int | float | bool) or value is None else str(value)}
