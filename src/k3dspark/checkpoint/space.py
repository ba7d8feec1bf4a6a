"""Free disk space, asked for before anything large is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from k3dspark.errors import EngineFault

MARGIN_BYTES: Final = 64 << 20


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise `EngineFault` unless the file system of `directory` (or of its nearest parent) has room to spare."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes + MARGIN_BYTES:
        raise EngineFault(
            f"not enough free space for {directory}",
            f"{needed_bytes:,} bytes are needed, with {MARGIN_BYTES:,} to spare, and {free:,} are free",
            "free some space, or name a directory on another disk",
        )
