"""Where shards go: a limit on what they may take, and writing one whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from k3dspark.checkpoint.files import sync_directory
from k3dspark.checkpoint.space import require_space
from k3dspark.errors import EngineFault

HEADER_BYTES = 4096  # more than the header of a shard takes
STALE_SECONDS = 3600


@dataclass(frozen=True)
class ShardRoom:
    """The bytes that all shards of a directory may take together; None: as many as the disk holds."""

    limit_bytes: int | None = None

    def left(self, directory: Path) -> float:
        """Bytes that shards may still take; infinite without a limit."""
        return float("inf") if self.limit_bytes is None else self.limit_bytes - sum(_sizes(directory))

    def used_up(self, directory: Path) -> bool:
        """Whether another shard as large as the largest would go over the limit: then none need be made."""
        return self.left(directory) < max(_sizes(directory), default=0)


def write_shard(shard: Mapping[str, Tensor], path: Path, room: ShardRoom) -> bool:
    """Write a shard to a temporary name, sync, rename. False, and nothing written, when it would go over the limit.

    Processes take turns, so that together they keep the limit. Raises `EngineFault` when the disk is full or fails;
    no part of the shard is then left.
    """
    size = sum(t.numel() * t.element_size() for t in shard.values()) + HEADER_BYTES
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        with FileLock(path.parent / ".shards.lock"):
            if size > room.left(path.parent):
                return False
            require_space(path.parent, size)
            save_file(dict(shard), temporary)
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, Exception) or isinstance(error, EngineFault):
            raise
        raise EngineFault(
            f"{path} could not be written",
            str(error),
            "free some space or name another --data directory; the shards that are there are whole, and the same "
            "command goes on from them",
        ) from error
    return True


def remove_stale(directory: Path) -> None:
    """Delete temporary files that a killed run left an hour ago or earlier; a younger one may be being written."""
    for path in directory.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def _sizes(directory: Path) -> list[int]:
    sizes = []
    for path in directory.glob("*.safetensors"):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return sizes
