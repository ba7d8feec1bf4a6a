"""Running git and git-lfs as programs: no prompts, no hooks, no leftovers when this process is killed."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

from k3dspark.errors import BadInput, EngineFault

PROTOCOLS: Final = "file:git:http:https:ssh"
_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG


def require_program(name: str, package: str) -> None:
    """Raise `BadInput` when a program is not installed."""
    if shutil.which(name) is None:
        raise BadInput(
            f"{name} is not installed",
            "a repository with large files is fetched with the real git and git-lfs",
            f"install it (Debian, Ubuntu: apt-get install {package}; openEuler: dnf install {package})",
        )


def git_environment(git_dir: Path) -> dict[str, str]:
    """The user's environment, so that proxies and credentials work, without what would redirect git elsewhere."""
    keep = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in _USERS_OWN}
    return keep | {
        "GIT_DIR": str(git_dir),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": PROTOCOLS,
        "GIT_LFS_SKIP_SMUDGE": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }


_USERS_OWN: Final = {
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_SSL_CAINFO",
    "GIT_SSL_NO_VERIFY",
    "GIT_ASKPASS",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_CONFIG_SYSTEM",
    "GIT_PROXY_COMMAND",
}


def run(
    arguments: Sequence[str],
    environment: dict[str, str],
    *,
    input: bytes | None = None,  # noqa: A002 - subprocess' own name
    output: IO[bytes] | int = subprocess.PIPE,
) -> bytes:
    """Standard output of a program. Raises `EngineFault` with its last words when it fails."""
    process = subprocess.run(
        list(arguments),
        env=environment,
        input=b"" if input is None else input,
        stdout=output,
        stderr=subprocess.PIPE,
        preexec_fn=_die_with_parent(),  # only a prctl, loaded beforehand: safe beside our own thread
        check=False,
    )
    if process.returncode != 0:
        words = process.stderr.decode("utf-8", "replace").strip().splitlines()
        raise EngineFault(
            f"{' '.join(arguments[:3])} failed with status {process.returncode}",
            " / ".join(line.strip() for line in words[-3:] if line.strip())[:600] or "it gave no reason",
            "correct what it says and run the command again: what has arrived is kept",
        )
    return process.stdout or b""


def _die_with_parent() -> Callable[[], None] | None:
    """A killed fetch must not leave a download running that the next one would collide with (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
