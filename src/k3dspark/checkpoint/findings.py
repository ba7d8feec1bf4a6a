"""What is wrong with a checkpoint, one `Finding` for each fault, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One fault. `id` is stable; `subject` is the file, tensor or config field that it is about."""

    id: str
    level: Level
    subject: str
    what: str
    why: str
    remedy: str


def error(name: str, subject: str, what: str, why: str, remedy: str) -> Finding:
    return Finding(name, "error", subject, what, why, remedy)


def warning(name: str, subject: str, what: str, why: str, remedy: str) -> Finding:
    return Finding(name, "warning", subject, what, why, remedy)
