"""Strict JSON within bounds: duplicate keys, deep nesting and floods of values are errors, never memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3dspark.errors import BadInput

CONFIG_BYTES = 1 << 20
# Each value costs up to about 200 bytes once parsed; commas and opening brackets bound their number. A safetensors
# header has eight of them for each tensor.
MAX_MARKS = 160_000


class JsonError(ValueError):
    """The text is not acceptable JSON; the message says why, in words for a person."""


def parse_json(data: bytes) -> Any:
    """The value of UTF-8 JSON text. Raises `JsonError`. Non-finite numbers parse; rules name the field."""
    marks = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if marks > MAX_MARKS:
        raise JsonError(f"it holds some {marks} values, far more than such a file can need")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise JsonError("it is nested too deeply") from error
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(f"it is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise JsonError("it holds a number of thousands of digits") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f'the key "{key[:80]}" stands there twice')
            seen.add(key)
    return mapping


def read_object(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises `BadInput` naming the file and the reason."""
    data = read_bounded(path, limit)
    try:
        value = parse_json(data)
    except JsonError as error:
        raise BadInput(f"{path} cannot be read", str(error), "fetch the file again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} cannot be read", "it does not hold a JSON object", "fetch the file again")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory, or the file itself. Raises `BadInput`."""
    return read_object(path / "config.json" if path.is_dir() else path)


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's bytes, if there are at most `limit`. Raises `BadInput`."""
    try:
        if not path.is_file():  # a fifo or device would block or never end
            reason = "it is not a regular file" if path.exists() else "there is no such file"
            raise BadInput(f"{path} cannot be read", reason, "check the path")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise BadInput(f"{path} cannot be read", str(error), "check the path and its permissions") from error
    if len(data) > limit:
        raise BadInput(f"{path} cannot be read", f"it is larger than {limit:,} bytes", "check that this is the file")
    return data
