"""What differs between two archived runs, and what a differing config field affects."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from k3dspark.checkpoint.explain import Language, explain_config
from k3dspark.errors import BadInput
from k3dspark.runbook.outcome import Fact
from k3dspark.runbook.run import Record
from k3dspark.runbook.steps import STEPS

CONFIG = "config."


@dataclass(frozen=True)
class Difference:
    """One fact of one step. `affects` and `breaks` say what a field of config.json decides, else they are empty."""

    step: str
    fact: str
    left: Fact
    right: Fact
    affects: str = ""
    breaks: str = ""


@dataclass(frozen=True)
class Comparison:
    """`causes` are fields of config.json; `effects` all the rest that differs; `unfinished` steps of either run."""

    causes: tuple[Difference, ...]
    effects: tuple[Difference, ...]
    asked: tuple[Difference, ...]
    unfinished: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not (self.causes or self.effects or self.unfinished)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": 1,
            "same": self.same,
            **{name: [asdict(item) for item in getattr(self, name)] for name in ("causes", "effects", "asked")},
            "unfinished": list(self.unfinished),
        }


def differences(left: Record, right: Record, language: Language = "en") -> Comparison:
    """Facts that are not equal, step by step in the order of the checklist; times and loads are left out."""
    causes, effects = [], []
    for step in STEPS:
        one, other = left.outcomes.get(step), right.outcomes.get(step)
        if one is None or other is None:
            continue
        ours, theirs = {"status": one.status, **one.facts}, {"status": other.status, **other.facts}
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) == theirs.get(name):
                continue
            found = Difference(step, name, ours.get(name), theirs.get(name))
            if step == "inspect" and name.startswith(CONFIG):
                causes.append(replace(found, **_meaning(name.removeprefix(CONFIG), language)))
            else:
                effects.append(found)
    asked = [
        Difference("asked", name, left.asked.get(name), right.asked.get(name))
        for name in sorted({*left.asked, *right.asked})
        if left.asked.get(name) != right.asked.get(name)
    ]
    unfinished = tuple(step for step in STEPS if (step in left.outcomes) != (step in right.outcomes))
    return Comparison(tuple(causes), tuple(effects), tuple(asked), unfinished)


def _meaning(field: str, language: Language) -> dict[str, str]:
    try:
        entry = explain_config({}, language, field).fields[0]
    except BadInput:  # a field that this project does not know
        return {}
    return {"affects": entry.decides, "breaks": entry.breaks}
