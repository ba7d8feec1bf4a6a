"""Every error this package raises on purpose.

    K3DSparkError            what, why, remedy; exit status
    ├── BadInput             2   unusable argument, file, config or checkpoint
    ├── CheckFailed          1   a check or comparison ran and did not hold
    └── EngineFault          3   an engine, device or network fault

The command line prints the three parts and no traceback.
"""

from __future__ import annotations


class K3DSparkError(Exception):
    """An error written for the person who will read it: what was found, why it matters, what to run next."""

    exit_status = 3

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why}. {remedy}")
        self.what = what
        self.why = why
        self.remedy = remedy


class BadInput(K3DSparkError):
    """Bad usage or unreadable input (exit status 2)."""

    exit_status = 2


class CheckFailed(K3DSparkError):
    """A check or comparison failed (exit status 1)."""

    exit_status = 1


class EngineFault(K3DSparkError):
    """An engine, device or network fault (exit status 3)."""

    exit_status = 3
