"""Directories that are built once, whole or not at all, and kept in the user's cache."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from k3dspark.errors import BadInput

MANIFEST = "manifest.json"  # {"files": {name: size in bytes}}, written last


def cache_root() -> Path:
    """Where converted models live: `K3DSPARK_CACHE`, or `k3dspark` in the platform's cache directory."""
    chosen = os.environ.get("K3DSPARK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG specification: a relative value is ignored
            base = "~/.cache"
    return Path(base).expanduser() / "k3dspark"


def is_whole(directory: Path) -> bool:
    """Whether the directory was built to its end and every file still has the size it had then."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all((directory / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def built_once(
    directory: Path, build: Callable[[Path], None], needed_bytes: int, announce: Callable[[str], None]
) -> Path:
    """`directory`, whole: built by `build(empty temporary directory)` when it is absent or damaged.

    Of several processes one builds and the others wait. A build that fails, is interrupted or killed leaves nothing
    behind that is mistaken for a result; what a killed one left is removed by the next. Raises `BadInput` when the
    cache cannot be written or has no room for `needed_bytes`.
    """
    if is_whole(directory):
        return directory
    root = directory.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f".{directory.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            announce(f"Another process is preparing {directory.name}; waiting for it.")
            lock.acquire()
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        # Another process may have built it while this one waited.
        if not is_whole(directory):
            _build(directory, build, needed_bytes)
    finally:
        lock.release()
    return directory


def _build(directory: Path, build: Callable[[Path], None], needed_bytes: int) -> None:
    root = directory.parent
    prefix = f".{directory.name}.tmp-"
    for stale in root.glob(f"{prefix}*"):  # the lock is ours: whoever made these is gone
        shutil.rmtree(stale, ignore_errors=True)
    try:
        if directory.exists():
            # Renamed before it is emptied: at no moment does half of it stand under its final name.
            shutil.rmtree(directory.rename(root / f"{prefix}damaged"))
        free = shutil.disk_usage(root).free
        if free < needed_bytes:
            raise BadInput(
                f"{root} has {free / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB are needed",
                "the converted model is kept there",
                "free some space, or set K3DSPARK_CACHE to a directory on a larger disk",
            )
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        build(temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1) + "\n", encoding="utf-8")
        # mkdtemp's 0700 and safetensors' 0600 would keep the other users of a shared cache out.
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
            _sync(path)
        _sync(temporary)
        temporary.rename(directory)
        _sync(root)
    except OSError as error:
        raise _unwritable(root, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when the rename happened


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # directories cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(root: Path, error: OSError) -> BadInput:
    return BadInput(
        f"cannot write to the cache directory {root}",
        f"{type(error).__name__}: {error}",
        "set K3DSPARK_CACHE to a directory this user can write to",
    )
