"""One run of the checklist into an archive, from the first step that is not done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from k3dspark import __version__
from k3dspark.errors import K3DSparkError
from k3dspark.runbook.archive import FORMAT, Archive
from k3dspark.runbook.asked import Asked
from k3dspark.runbook.outcome import Outcome
from k3dspark.runbook.steps import STEPS, Workshop


@dataclass(frozen=True)
class Record:
    """A run: what was asked, and the outcome of every step that has finished, in order."""

    asked: Mapping[str, Any]
    outcomes: Mapping[str, Outcome]

    @property
    def complete(self) -> bool:
        return set(self.outcomes) == set(STEPS)

    @property
    def passed(self) -> bool:
        return self.complete and not any(outcome.status == "fail" for outcome in self.outcomes.values())

    def as_json(self) -> dict[str, Any]:
        """The archived run as one object (docs/runbook.md)."""
        return {
            "format": FORMAT,
            "asked": {key: value for key, value in self.asked.items() if key != "format"},
            "complete": self.complete,
            "passed": self.passed,
            "steps": [{"step": step, **outcome.as_json()} for step, outcome in self.outcomes.items()],
        }


def run(asked: Asked, archive: Archive, began: Callable[[str, bool], None] = lambda step, kept: None) -> Record:
    """Run what is not done; `began` hears of each step, and whether its earlier outcome is kept.

    A step that failed, and everything after it, is run again. A fault inside a step is its outcome, not the end.
    """
    facts = {**asked.as_json(), "version": __version__}
    with archive.locked():
        archive.begin(facts)
        outcomes: dict[str, Outcome] = {}
        workshop = Workshop(asked)
        fresh = False
        for name, step in STEPS.items():
            outcome = None if fresh else archive.outcome(name)
            kept = outcome is not None and outcome.status != "fail"
            began(name, kept)
            if outcome is None or not kept:
                fresh = True
                started = time.monotonic()
                try:
                    outcome = step(workshop)
                except K3DSparkError as error:
                    outcome = Outcome("fail", f"{error.what}: {error.why}", advice=(error.remedy,))
                seconds = round(time.monotonic() - started, 3)
                outcome = replace(outcome, figures={**outcome.figures, "seconds": seconds})
                archive.keep(name, outcome)
            outcomes[name] = outcome
    return Record(facts, outcomes)


def read(archive: Archive) -> Record:
    """The run of an archive, finished or not. Raises `BadInput` when it is none."""
    asked = archive.asked()
    found = {name: archive.outcome(name) for name in STEPS}
    return Record(asked, {name: outcome for name, outcome in found.items() if outcome is not None})
