"""Safetensors files as mapped memory: tensors without a copy, and pages that can be given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from k3dspark.checkpoint.header import TensorEntry

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip


class MappedFile:
    """One file, mapped privately: writing to a tensor of it never reaches the file.

    Tensors may lie on odd two-byte boundaries; plain kernels read them, but whoever needs alignment must copy.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data = 8 + int.from_bytes(self._map[:8], "little")
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin, self._end = whole.data_ptr(), whole.data_ptr() + whole.numel()

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor of a header entry, as a view of the file."""
        dtype = DTYPES[entry.dtype]
        if not entry.parameters:
            return torch.empty(entry.shape, dtype=dtype)
        offset = self._data + entry.begin
        return torch.frombuffer(self._map, dtype=dtype, count=entry.parameters, offset=offset).view(entry.shape)

    def give_back(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from this process if it lies in this file; read again, they come from the file.

        Only for tensors that nobody wrote to: what was written is dropped with the pages.
        """
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if not self._begin <= begin < self._end or not hasattr(self._map, "madvise"):
            return
        first = -(-(begin - self._begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (end - self._begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
