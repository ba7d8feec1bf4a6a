"""Single rows of a stored matrix, read by file offset, and compared bit by bit without torch."""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k3dspark.checkpoint.header import BITS, Header, TensorEntry

MAX_ROW_BYTES: Final = 1 << 20
FLOATS: Final = {"F32", "BF16", "F16"}


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, width] inside a safetensors file."""

    path: Path
    header: Header
    entry: TensorEntry

    @property
    def row_bytes(self) -> int:
        return self.entry.shape[1] * BITS[self.entry.dtype] // 8

    def readable(self) -> bool:
        """Whether rows can be read as floats: a whole, unquantised matrix."""
        return (
            len(self.entry.shape) == 2
            and self.entry.dtype in FLOATS
            and self.row_bytes <= MAX_ROW_BYTES
            and self.header.missing_bytes <= 0
        )

    def rows(self, indices: Sequence[int]) -> list[bytes]:
        """The stored bytes of these rows."""
        start = 8 + self.header.header_bytes + self.entry.begin
        with self.path.open("rb") as file:
            found = []
            for index in indices:
                file.seek(start + index * self.row_bytes)
                found.append(file.read(self.row_bytes))
        return found


def as_floats(data: bytes, dtype: str) -> list[float]:
    """Values of a row, exact: every stored format fits a double."""
    if dtype == "F16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "BF16":
        words = array.array("H", data)
        if sys.byteorder == "big":
            words.byteswap()
        return list(struct.unpack(f"<{len(words)}f", b"".join(struct.pack("<I", word << 16) for word in words)))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def equal_in(first: list[float], second: list[float], dtype: str) -> bool:
    """Whether two rows are the same once both are rounded to `dtype`."""
    return _rounded(first, dtype) == _rounded(second, dtype)


def _rounded(values: list[float], dtype: str) -> bytes:
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *(max(-65504.0, min(65504.0, v)) for v in values))
    data = struct.pack(f"<{len(values)}f", *values)
    if dtype == "F32":
        return data
    bits = struct.unpack(f"<{len(values)}I", data)
    return struct.pack(f"<{len(values)}H", *(min((b + 0x7FFF + ((b >> 16) & 1)) >> 16, 0xFFFF) for b in bits))


def norm(values: list[float]) -> float:
    """Euclidean length."""
    return math.sqrt(math.fsum(v * v for v in values))
