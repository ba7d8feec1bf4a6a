"""Random numbers that depend on nothing but a request's seed, the anchor's position, the slot and their use.

Philox4x32-10 (Salmon et al. 2011) is a counter-based generator: the number at a counter needs no state, so batch
composition, preemption and the order of requests cannot change it.

The position is the anchor's, which grows every round: a number that helped to reject a token is never used again, as
it would be if numbers belonged to the positions of the drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Stream(IntEnum):
    """What a number is used for. One number for two uses would bias the output (spec D.5)."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream, slots: int) -> torch.Tensor:
    """fp64 [B, slots] in [0, 1) with 53 random bits, for B requests with their anchors at `positions`."""
    return torch.from_numpy((_bits(seeds, positions, stream, slots) >> np.uint64(11)) * 2.0**-53)


def coarse_uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream, slots: int) -> torch.Tensor:
    """As `uniforms` with 24 random bits: exact in fp32, where finer numbers would round up to 1."""
    return torch.from_numpy((_bits(seeds, positions, stream, slots) >> np.uint64(40)) * 2.0**-24)


def _bits(seeds: Sequence[int], positions: Sequence[int], stream: Stream, slots: int) -> NDArray[np.uint64]:
    batch = len(seeds)
    key = np.array(seeds, dtype=np.uint64)[:, None]
    position = np.array(positions, dtype=np.uint64)[:, None]
    counter = np.broadcast_arrays(
        position & _WORD, position >> _SHIFT, np.arange(slots, dtype=np.uint64)[None, :], np.uint64(stream)
    )
    words = philox([c.reshape(batch, slots) for c in counter], [key & _WORD, key >> _SHIFT])
    return (words[0] << _SHIFT) | words[1]


def philox(counter: Sequence[NDArray[np.uint64]], key: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 of four counter words and two key words, each in the low half of a uint64 array."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        wide0, wide1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (wide1 >> _SHIFT) ^ c1 ^ k0, wide1 & _WORD, (wide0 >> _SHIFT) ^ c3 ^ k1, wide0 & _WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _WORD, (k1 + np.uint64(0xBB67AE85)) & _WORD
    return [c0, c1, c2, c3]
