"""Safetensors headers, read without torch and without believing what they claim.

A file is N, the header's length, in 8 bytes little-endian; then N bytes of JSON,
`{"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ..}`; then the data section, to which the
offsets are relative.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.jsonfile import JsonError, parse_json
from k3dspark.checkpoint.pointer import read_pointer
from k3dspark.errors import BadInput

# Ours, not the format's: a header this long would describe some 15,000 tensors.
HEADER_BYTES: Final = 2 << 20
MAX_RANK: Final = 16

BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


class MalformedFile(BadInput):
    """A file that is not what its name says. `kind` is stable, for reports and tests."""

    def __init__(self, kind: str, what: str, why: str, remedy: str) -> None:
        super().__init__(what, why, remedy)
        self.kind = kind


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header states it; `begin` and `end` are relative to the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A well-formed header; whether the data behind it is all there, `missing_bytes` says."""

    path: Path
    header_bytes: int
    file_bytes: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    @property
    def data_bytes(self) -> int:
        return max((entry.end for entry in self.tensors.values()), default=0)

    @property
    def expected_bytes(self) -> int:
        """Size the file must have for its own header to be true."""
        return 8 + self.header_bytes + self.data_bytes

    @property
    def missing_bytes(self) -> int:
        """Positive when the file is cut short, negative when it is too long."""
        return self.expected_bytes - self.file_bytes

    @property
    def parameters(self) -> int:
        return sum(entry.parameters for entry in self.tensors.values())

    def require_whole(self) -> Header:
        """Itself. Raises `MalformedFile` when the file is truncated or over-long."""
        if self.missing_bytes:
            raise length_error(self)
        return self


def length_error(header: Header) -> MalformedFile:
    """The error for a file whose data section is not as long as its header says."""
    short = header.missing_bytes > 0
    return MalformedFile(
        "truncated" if short else "overlong",
        f"{header.path.name} is {'cut short' if short else 'too long'} by {abs(header.missing_bytes):,} bytes",
        f"it has {header.file_bytes:,} bytes, and its own header accounts for {header.expected_bytes:,}",
        "the download did not finish; fetch it again" if short else "the file is damaged; fetch it again",
    )


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises `MalformedFile` (or `BadInput` when it cannot be opened).

    Allocates at most 64 MiB, whatever the file says. The data section may still be truncated:
    see `Header.require_whole`.
    """
    try:
        if not path.is_file():
            reason = "it is not a regular file" if path.exists() else "there is no such file"
            raise BadInput(f"{path} cannot be read", reason, "check the path")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            _refuse_what_is_no_safetensors(path, start, file_bytes)
            (length,) = struct.unpack("<Q", start)
            if length > file_bytes - 8:
                # Only here: a sound header's length may begin with the same bytes.
                if start[:4] == b"PK\x03\x04" or (start[0] == 0x80 and start[1] <= 5):
                    raise _pickle(path)
                raise _malformed(
                    path,
                    "header_length",
                    f"it claims a header of {length:,} bytes, and {file_bytes - 8:,} bytes follow",
                )
            if length > HEADER_BYTES:
                raise _malformed(
                    path, "header_length", f"it claims a header of {length:,} bytes; no model needs {HEADER_BYTES:,}"
                )
            data = file.read(length)
    except OSError as error:
        raise BadInput(f"{path} cannot be read", str(error), "check the path and its permissions") from error
    if len(data) != length:
        raise _malformed(path, "header_length", "the file shrank while it was read")
    tensors, metadata = _parse(path, data)
    return Header(path, length, file_bytes, tensors, metadata)


def _refuse_what_is_no_safetensors(path: Path, start: bytes, file_bytes: int) -> None:
    if start == b"version ":
        pointer = read_pointer(path)
        if pointer is not None:
            raise MalformedFile(
                "lfs_pointer",
                f"{path.name} is a Git LFS pointer of {file_bytes} bytes, not the weights",
                f"the real file has {pointer.size:,} bytes (sha256 {pointer.sha256})",
                "run `git lfs install && git lfs pull` in the clone, or `k3dspark fetch --repull --to DIR`",
            )
    if file_bytes < 8:
        raise _malformed(path, "not_safetensors", f"it has {file_bytes} bytes, and a header's length alone takes 8")


def _pickle(path: Path) -> MalformedFile:
    return MalformedFile(
        "pickle",
        f"{path.name} is a pickle or zip archive, not safetensors",
        "such files can run code when they are opened, so they never are",
        "fetch the safetensors file instead",
    )


def _malformed(path: Path, kind: str, why: str) -> MalformedFile:
    return MalformedFile(kind, f"{path.name} is not a sound safetensors file", why, "fetch it again")


def _parse(path: Path, data: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    if not data.startswith(b"{"):
        raise _malformed(path, "not_safetensors", "its header does not begin with {")
    try:
        mapping = parse_json(data)
    except JsonError as error:
        raise _malformed(path, "header_json", f"its header: {error}") from error
    metadata = mapping.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(path, "header_json", "its __metadata__ is not a map of strings")
    tensors = {name: _entry(path, name, entry) for name, entry in mapping.items()}
    _require_contiguous(path, tensors)
    return tensors, metadata


def _entry(path: Path, name: str, entry: Any) -> TensorEntry:
    shown = name[:120]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(path, "header_entry", f"the entry of {shown} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _malformed(path, "header_entry", f"the dtype of {shown} is unknown: {str(dtype)[:40]}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise _malformed(path, "header_entry", f"the shape of {shown} is not a short list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise _malformed(path, "header_entry", f"the offsets of {shown} are not two positions")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise _malformed(
            path, "header_entry", f"{shown}: {dtype}{shape} needs {bits // 8} bytes, its offsets span {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _require_contiguous(path: Path, tensors: dict[str, TensorEntry]) -> None:
    position = 0
    for entry in sorted(tensors.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise _malformed(path, "header_offsets", f"{entry.name[:120]} {kind}, at byte {entry.begin}")
        position = entry.end
