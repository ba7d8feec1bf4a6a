"""Locks between processes: one fetch into a directory at a time, one run into an archive."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3dspark.checkpoint.manifest import STATE
from k3dspark.errors import BadInput, EngineFault


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises `BadInput` while another process does. A killed process leaves none behind."""
    state = directory / STATE
    if state.is_symlink():
        raise BadInput(f"{state} is a symbolic link", "fetch keeps its state in a real directory", "remove the link")
    state.mkdir(parents=True, exist_ok=True)
    (state / ".gitignore").write_text("*\n")  # in a clone, `git status` need not show it
    busy = f"another fetch into {directory} is running", "wait for it to end, or fetch into another directory"
    with hold(state / "lock", *busy):
        yield


@contextmanager
def hold(path: Path, busy: str, remedy: str) -> Iterator[None]:
    """Hold the lock of the file `path`. Raises `BadInput` (`busy`, `remedy`) while another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            raise BadInput(busy, f"process {holder or 'unknown'} holds its lock", remedy) from problem
        except OSError as problem:
            raise EngineFault(
                f"{path.parent} cannot be locked", str(problem), "use a file system with locks, then move the files"
            ) from problem
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
