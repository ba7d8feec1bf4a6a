"""The directory of a run: what was asked, and each step's outcome as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.checkpoint.lock import hold
from k3dspark.errors import BadInput
from k3dspark.runbook.outcome import Outcome

FORMAT: Final = 1
ASKED, STEPS = "asked.json", "steps"
LIMIT: Final = 1 << 24  # bytes of one file


class Archive:
    """Written step by step; every file is whole or not there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the archive: two runs into one directory would mix. Raises `BadInput` while another does."""
        (self.directory / STEPS).mkdir(parents=True, exist_ok=True)
        busy = f"another run writes into {self.directory}", "wait, or name another directory"
        with hold(self.directory / "lock", *busy):
            yield

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Note what is asked. Raises `BadInput` when the directory holds a run that was asked something else."""
        path = self.directory / ASKED
        if not path.is_file():
            write_json(path, {"format": FORMAT, **asked})
            return
        before = read_object(path, LIMIT)
        changed = sorted(k for k in {*before, *asked} - {"format"} if before.get(k) != asked.get(k))
        if changed:
            raise BadInput(
                f"{self.directory} holds another run",
                f"{', '.join(changed)} changed since: {before.get(changed[0])} before, {asked.get(changed[0])} now",
                "name a new directory (and compare the two with k3dspark runbook diff)",
            )

    def asked(self) -> dict[str, Any]:
        """What was asked. Raises `BadInput` when the directory is no archive."""
        path = self.directory / ASKED
        if not path.is_file():
            raise BadInput(
                f"{self.directory} is no archive of a run", f"it has no {ASKED}", "give a directory of runbook run"
            )
        return read_object(path, LIMIT)

    def outcome(self, step: str) -> Outcome | None:
        """What a step found, None when it has not finished. Raises `BadInput` for a damaged file."""
        path = self._path(step)
        if not path.is_file():
            return None
        try:
            return Outcome.of_json(read_object(path, LIMIT))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is damaged", f"{type(error).__name__}: {error}", "remove it and run again"
            ) from error

    def keep(self, step: str, outcome: Outcome) -> None:
        write_json(self._path(step), outcome.as_json())

    def _path(self, step: str) -> Path:
        return self.directory / STEPS / f"{step}.json"
