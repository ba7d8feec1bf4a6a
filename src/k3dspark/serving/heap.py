"""The C heap of a server that runs for weeks."""

from __future__ import annotations

import ctypes
from contextlib import suppress

ARENA_MAX, MMAP_THRESHOLD = -8, -3  # mallopt's names, from malloc.h
ARENAS = 2
LARGE_BYTES = 1024 * 1024


def bound_heap() -> None:
    """Have the caches of a request go back to the system when it ends; call it before threads start.

    glibc gives every thread an arena of its own and, after the first large block was freed, takes large blocks from
    them too, up to 32 MB. Caches of all sizes that come and go between the small objects of several threads then leave
    holes that nobody fills, and memory creeps for hours. Other C libraries have no such settings: nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(ARENA_MAX, ARENAS)
        libc.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
