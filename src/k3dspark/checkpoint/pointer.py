"""Git LFS pointers: the small text file that stands where a weight file should be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

POINTER_BYTES = 1024  # the LFS specification's own limit
_VERSION = b"version https://git-lfs.github.com/spec/v1\n"
_OID = re.compile(rb"^oid sha256:([0-9a-f]{64})$", re.MULTILINE)
_SIZE = re.compile(rb"^size ([0-9]{1,19})$", re.MULTILINE)


@dataclass(frozen=True)
class Pointer:
    """What an LFS pointer points to: the sha256 (hex) and size in bytes of the real file."""

    sha256: str
    size: int


def parse_pointer(data: bytes) -> Pointer | None:
    """The pointer in these bytes, or None when they are something else."""
    if len(data) > POINTER_BYTES or not data.startswith(_VERSION):
        return None
    oid, size = _OID.search(data), _SIZE.search(data)
    return Pointer(oid[1].decode(), int(size[1])) if oid and size else None


def read_pointer(path: Path) -> Pointer | None:
    """The pointer in a file, or None. Reads at most 1 KiB; an unreadable file is None."""
    try:
        with path.open("rb") as file:
            return parse_pointer(file.read(POINTER_BYTES + 1))
    except OSError:
        return None


def pointer_text(pointer: Pointer) -> bytes:
    """The pointer file's bytes; 135 of them for a size of ten digits."""
    return _VERSION + f"oid sha256:{pointer.sha256}\nsize {pointer.size}\n".encode()
