"""Lines of shell with a reason each: variables and options, rendered so that a reader sees why each one is there."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """Words of a command. `expand` marks the value as shell text in double quotes, not literal."""

    words: tuple[str, ...]
    reason: str
    expand: bool = False

    def shell(self) -> str:
        if not self.expand:
            return " ".join(map(shlex.quote, self.words))
        *flags, value = self.words
        return " ".join([*map(shlex.quote, flags), f'"{value}"'])


@dataclass(frozen=True)
class Variable:
    """An environment variable of the engine."""

    name: str
    value: str
    reason: str
    expand: bool = False

    def shell(self) -> str:
        return f'export {self.name}="{self.value}"' if self.expand else f"export {self.name}={shlex.quote(self.value)}"


def option(*words: str, why: str) -> Option:
    return Option(words, why)


def comment(text: str, indent: str = "") -> list[str]:
    """A reason as comment lines of at most 110 characters."""
    return [f"{indent}# {line}" for line in textwrap.wrap(text, 110 - len(indent), break_on_hyphens=False)]


def exports(variables: Iterable[Variable]) -> list[str]:
    return [line for variable in variables for line in (*comment(variable.reason), variable.shell())]


def array(name: str, options: Iterable[Option]) -> list[str]:
    """A bash array: comments may stand between its words, which a continued line does not allow."""
    body = [line for o in options for line in (*comment(o.reason, "  "), f"  {o.shell()}")]
    return [f"{name}=(", *body, ")"]
