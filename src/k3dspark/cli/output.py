"""What commands share when they print: JSON, tables, and text from files that must not drive a terminal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from k3dspark.errors import BadInput


def clean(text: str) -> str:
    """Control characters and unprintable ones as \\x1b and the like."""
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(value: object, indent: int | None = 2) -> None:
    """One JSON object on standard output, in ASCII where the output cannot take more."""
    unicode_output = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(value, ensure_ascii=not unicode_output, indent=indent, allow_nan=False)
    # A file name that is no UTF-8 comes as lone surrogates, which cannot be printed.
    print(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def table(*columns: tuple[str, str]) -> Any:
    """An empty rich table with (heading, justification) columns."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading, justify in columns:
        result.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return result


def check_place(path: Path, remedy: str = "name a file in a directory that you can write to") -> None:
    """Refuse now a file that could not be written after an hour's work. Raises `BadInput`."""
    parent = path.parent
    if path.is_dir() or not (parent.is_dir() or not parent.exists()):
        raise BadInput(f"cannot write {path}", "it is a directory, or lies in something that is none", "name a file")
    if parent.is_dir() and not os.access(parent, os.W_OK):
        raise BadInput(f"cannot write {path}", f"{parent} is not writable for this user", remedy)
