"""Running a foreign tool that may be missing, fail, hang, or print without end: an outcome, never an exception."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

Outcome = Literal["ok", "missing", "failed", "hung"]

OUTPUT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a program ended. `stdout` and `stderr` are the first megabyte of each."""

    program: str
    outcome: Outcome
    status: int | None = None
    stdout: str = ""
    stderr: str = ""
    timeout_seconds: float = 0.0

    @property
    def said(self) -> str:
        """The first line of what it complained about."""
        lines = [line.strip() for line in (self.stderr + "\n" + self.stdout).splitlines() if line.strip()]
        return lines[0][:200] if lines else ""


def run(arguments: Sequence[str], timeout_seconds: float, standard_input: str = "") -> Ran:
    """Run a program found on PATH, for at most so many seconds; then it and its children are killed."""
    program = arguments[0]
    if shutil.which(program) is None:
        return Ran(program, "missing")
    # Files, not pipes: a grandchild that keeps a pipe open would hold us after the program itself is gone.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(standard_input.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                list(arguments),
                stdin=given,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C", "LANG": "C"},
            )
        except OSError as error:
            return Ran(program, "failed", None, "", str(error))
        hung = False
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                # A tool that waits for a dead driver cannot be killed either: leave it rather than hang with it.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode("utf-8", "replace"))
    if hung:
        return Ran(program, "hung", None, texts[0], texts[1], timeout_seconds)
    return Ran(program, "failed" if process.returncode else "ok", process.returncode, texts[0], texts[1])
