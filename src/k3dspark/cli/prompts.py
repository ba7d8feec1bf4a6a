"""Where a command's prompt comes from: the argument, an option, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from k3dspark.errors import BadInput

STANDARD_INPUT = "-"


def read(argument: str | None, option: str | None = None, file: Path | None = None) -> str:
    """The one prompt that was given. Raises `BadInput` on none, several, an empty one, or one that is not UTF-8."""
    given = [value for value in (argument, option, file) if value is not None]
    if len(given) != 1:
        raise BadInput(
            "no prompt" if not given else "more than one prompt",
            "one is needed, as an argument, --prompt, --prompt-file or '-' for standard input",
            "for example: k3dspark generate 'Why is the sky blue?'",
        )
    if file is not None:
        text = _standard_input() if str(file) == STANDARD_INPUT else _file(file)
    elif argument == STANDARD_INPUT:
        text = _standard_input()
    else:
        text = given[0] if isinstance(given[0], str) else ""
    if not text.strip():
        raise BadInput("the prompt is empty", "there is nothing to answer", "give some text")
    return text


def _standard_input() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
    return _decode(sys.stdin.buffer.read(), "standard input")


def _file(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise BadInput(f"cannot read {path}", error.strerror or str(error), "check the path") from error


def _decode(content: bytes, name: str) -> str:
    """UTF-8 with or without a byte-order mark; the line break that ends a text file is not part of the prompt."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name} is not UTF-8",
            f"byte {error.start} is 0x{content[error.start]:02x}",
            "convert it, for example with iconv",
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
