"""Everything a server is told before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from k3dspark.errors import BadInput

KEY_VARIABLE = "K3DSPARK_API_KEY"


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, and how much may wait. Times in seconds."""

    body_bytes: int = 4 * 1024 * 1024
    body_seconds: float = 30.0  # to receive a body
    prompt_tokens: int | None = None  # None: the model's context
    new_tokens: int | None = None
    choices: int = 16  # `n` times the number of prompts
    stops: int = 16
    queue: int = 256  # choices that wait while others run; more are refused with 429
    request_seconds: float = 600.0  # from arrival to the last byte, waiting included
    drain_seconds: float = 120.0  # after SIGTERM

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0 and not (name == "queue" and value == 0):  # nan is not above 0
                raise BadInput(f"the limit {name} is {value}", "nothing could ever be served", "pass more than 0")


@dataclass(frozen=True)
class Defaults:
    """Sampling of requests that do not say; the ones that the OpenAI API documents unless the operator says."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    verifier: Literal["block", "token"] = "block"


@dataclass(frozen=True)
class Settings:
    """One server. `api_keys` empty: open to all. `log_prompts` writes prompts to the log."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None  # None: the pair's own
    limits: Limits = field(default_factory=Limits)
    defaults: Defaults = field(default_factory=Defaults)
    api_keys: tuple[str, ...] = ()
    log_format: Literal["lines", "json"] = "lines"
    log_prompts: bool = False
    running: int = 32  # requests decoded at once


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Keys from a file, one a line ('#' begins a comment), and from K3DSPARK_API_KEY.

    Raises `BadInput` when the file cannot be read or holds no key: a server must not open up by mistake.
    """
    keys = [key for key in [environment.get(KEY_VARIABLE, "").strip()] if key]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"cannot read the key file {file}", str(error), "pass a UTF-8 file with one key a line"
            ) from (error)
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise BadInput(f"{file} holds no key", "the server would be open to everyone", "write one key a line")
        keys += found
    return tuple(dict.fromkeys(keys))
