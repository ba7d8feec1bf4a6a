"""Context rows of one sequence: normalised latent and rotated key, every layer, grown in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from k3dspark.errors import BadInput

BLOCK_TOKENS = 4096


class LatentCache:
    """Rows [L, n, kv_lora_rank + qk_rope_head_dim] of positions 0 … n−1.

    Storage grows by blocks of `block_tokens`, so a million tokens never needs a copy of the whole. A row is
    written once and only ever dropped from the end (`truncate`); block rows of the draft never enter.
    """

    def __init__(
        self,
        layers: int,
        row_width: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.layers = layers
        self.row_width = row_width
        self.block_tokens = block_tokens
        self._dtype = dtype
        self._device = device
        self._blocks: list[Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def bytes_per_token(self) -> int:
        """5,760 at Kimi K3 geometry in bf16."""
        return self.layers * self.row_width * self._dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        """What the blocks take: at most one block more than the tokens held."""
        return len(self._blocks) * self.block_tokens * self.bytes_per_token

    def append(self, rows: Tensor) -> None:
        """Add rows [L, T, W] after the last one. Raises `BadInput` on another shape."""
        if rows.dim() != 3 or rows.shape[0] != self.layers or rows.shape[2] != self.row_width:
            raise BadInput(
                f"context rows have shape {list(rows.shape)}",
                f"this cache holds [{self.layers}, T, {self.row_width}]",
                "pass the result of K3DSparkModel.context_rows of the same model",
            )
        done = 0
        while done < rows.shape[1]:
            block, offset = divmod(self._length, self.block_tokens)
            if block == len(self._blocks):
                shape = (self.layers, self.block_tokens, self.row_width)
                self._blocks.append(torch.empty(shape, dtype=self._dtype, device=self._device))
            count = min(self.block_tokens - offset, rows.shape[1] - done)
            self._blocks[block][:, offset : offset + count] = rows[:, done : done + count]
            done += count
            self._length += count

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; whole blocks beyond them are freed."""
        if not 0 <= length <= self._length:
            raise BadInput(
                f"cannot truncate a cache of {self._length} tokens to {length}",
                "only rows that exist can be kept",
                "pass a length between 0 and the current length",
            )
        self._length = length
        del self._blocks[-(-length // self.block_tokens) :]

    def rows(self, start: int, stop: int) -> Tensor:
        """A copy [L, stop - start, W] of the rows of tokens `start` … `stop - 1`."""
        copied = torch.empty(self.layers, stop - start, self.row_width, dtype=self._dtype, device=self._device)
        while start < stop:
            block, offset = divmod(start, self.block_tokens)
            count = min(self.block_tokens - offset, stop - start)
            place = copied.shape[1] - (stop - start)
            copied[:, place : place + count] = self._blocks[block][:, offset : offset + count]
            start += count
        return copied

    def copy(self) -> LatentCache:
        """Another cache with the same rows."""
        copied = LatentCache(self.layers, self.row_width, self._dtype, self._device, self.block_tokens)
        copied.append(self.rows(0, self._length))
        return copied

    def chunks(self, layer: int) -> list[Tensor]:
        """Views [n_i, W] of one layer's rows in order; empty when the cache is."""
        full, rest = divmod(self._length, self.block_tokens)
        views = [block[layer] for block in self._blocks[:full]]
        return [*views, self._blocks[full][layer, :rest]] if rest else views
