"""The little of YAML that configuration files need: mappings, lists, quoted strings, blocks of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def dump(value: Any, indent: int = 0) -> str:
    """A document. Strings are JSON strings, which every YAML reader takes, or literal blocks where they have lines."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        return "".join(f"{pad}{key}:{_inline_or_below(item, indent)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        lines = []
        for item in value:
            body = dump(item, indent + 1)
            # The first key of an item stands beside its dash.
            lines.append(f"{pad}- {body.lstrip()}")
        return "".join(lines)
    return f"{pad}{json.dumps(value, ensure_ascii=False)}\n"


def _inline_or_below(value: Any, indent: int) -> str:
    if isinstance(value, str) and "\n" in value:
        pad = "  " * (indent + 1)
        return " |-\n" + "".join(f"{pad}{line}\n" for line in value.splitlines())
    if isinstance(value, Mapping | list | tuple):
        return f"\n{dump(value, indent + 1)}" if value else (" {}\n" if isinstance(value, Mapping) else " []\n")
    return f" {json.dumps(value, ensure_ascii=False)}\n"
