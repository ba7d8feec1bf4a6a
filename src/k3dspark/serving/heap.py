"""The C heap of a server that runs for weeks."""

from __future__ import annotations

import asyncio
import ctypes

TRIM_SECONDS = 60.0


def trim_heap() -> bool:
    """Give free pages back to the system; False where the C library has no such call (it is glibc's).

    Caches of all sizes come and go between the small objects of several threads. glibc keeps the holes in between,
    which are not lost but let memory creep for hours; this frees their pages, in some milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


async def keep_trimmed(seconds: float = TRIM_SECONDS) -> None:
    """`trim_heap` every so often, until cancelled."""
    while await asyncio.to_thread(trim_heap):
        await asyncio.sleep(seconds)
