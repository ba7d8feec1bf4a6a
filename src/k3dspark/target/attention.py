"""Attention whose result for a row never depends on how far the cache has grown or how rows were grouped.

Keys lie in chunks of a fixed size. Every chunk is attended by a kernel call of one fixed shape per (chunk, key-value
head), which also returns the log-sum-exp; chunks are merged in ascending order (Dao et al. 2023, FlashDecoding). A
chunk that is wholly masked for a row has the weight exp(-1e30 - m) = 0 exactly, so it changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

MASKED = -1e30  # finite, so that a wholly masked chunk yields no NaN


class KeyValueCache:
    """Keys and values of one sequence in fp32 chunks; `length` tokens are committed, rows beyond it are scratch.

    Keys are stored rotated, with the two halves of a rotary pair side by side, so that `complex_keys` views them.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, chunk: int, device: torch.device) -> None:
        self.length = 0
        self.chunk = chunk
        self.keys = torch.zeros(layers, 0, kv_heads, chunk, head_dim, device=device)
        self.values = self.keys
        self.complex_keys = torch.zeros(layers, 0, kv_heads, chunk, head_dim // 2, dtype=torch.complex64, device=device)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens; growth at least doubles, so appending costs amortised constant time."""
        layers, held, kv_heads, chunk, head_dim = self.keys.shape
        wanted = -(-tokens // chunk)
        if wanted <= held:
            return
        # Zeros, not empty memory: a masked NaN would still poison the weighted values (0 · NaN).
        grown = torch.zeros(2, layers, max(wanted, 2 * held), kv_heads, chunk, head_dim, device=self.keys.device)
        grown[0, :, :held] = self.keys
        grown[1, :, :held] = self.values
        self.keys, self.values = grown.unbind(0)
        self.complex_keys = torch.view_as_complex(self.keys.unflatten(-1, (-1, 2)))

    def copy(self, start: int, count: int) -> torch.Tensor:
        """Keys and values of `count` tokens, [2, layers, kv_heads, count, head_dim]."""
        shape = (2, self.keys.shape[0], self.keys.shape[2], count, self.keys.shape[4])
        copied = torch.empty(shape, device=self.keys.device)
        for row, chunk, slots in self.pieces(start, count):
            size = slots.stop - slots.start
            copied[0, :, :, row : row + size] = self.keys[:, chunk, :, slots]
            copied[1, :, :, row : row + size] = self.values[:, chunk, :, slots]
        return copied

    def append(self, rows: torch.Tensor) -> None:
        """Add what `copy` gave after the committed tokens."""
        count = rows.shape[3]
        self.reserve(self.length + count)
        for row, chunk, slots in self.pieces(self.length, count):
            size = slots.stop - slots.start
            self.keys[:, chunk, :, slots] = rows[0, :, :, row : row + size]
            self.values[:, chunk, :, slots] = rows[1, :, :, row : row + size]
        self.length += count

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, slice]]:
        """(index of the first token, chunk, slots of the chunk) for every chunk that these tokens touch."""
        row = 0
        while row < count:
            chunk, slot = divmod(start + row, self.chunk)
            size = min(count - row, self.chunk - slot)
            yield row, chunk, slice(slot, slot + size)
            row += size


def chunk_mask(limits: torch.Tensor, group: int, chunks: int, chunk: int) -> torch.Tensor:
    """Additive mask [chunks, 1, rows * group, chunk]: row r of `limits` sees the keys 0..limits[r]."""
    keys = torch.arange(chunks * chunk, device=limits.device)
    hidden = (keys[None, :] > limits[:, None]).float() * MASKED  # [rows, chunks * chunk]
    rows = limits.shape[0]
    spread = hidden.view(rows, 1, chunks, chunk).expand(rows, group, chunks, chunk)
    return spread.reshape(rows * group, chunks, chunk).transpose(0, 1).contiguous()[:, None]


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """queries [chunks, kv_heads, rows, head_dim], expanded, over keys, values [chunks, kv_heads, chunk, head_dim].

    All fp32. Returns [rows, kv_heads, head_dim]. `mask` is as from `chunk_mask`; rows are token-major, the query
    heads of a group within a token.
    """
    chunks = keys.shape[0]
    out, lse = _attend_chunks(queries, keys, values, mask, scale)
    out = out.transpose(1, 2)  # [chunks, rows, kv_heads, head_dim]
    if chunks == 1:  # its weight would be exp(0) / exp(0)
        return out[0]
    # In float64, so that the last bit of a vectorised exponential cannot reach the result.
    weights = torch.softmax(lse.transpose(1, 2).double(), 0).float().unsqueeze(-1)  # [chunks, rows, kv_heads, 1]
    pieces, shares = out.unbind(0), weights.unbind(0)
    merged = pieces[0] * shares[0]
    for piece, share in zip(pieces[1:], shares[1:], strict=True):
        merged += piece * share  # one by one: a reduction would order its terms by their number
    return merged


def _attend_chunks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per chunk: outputs [chunks, kv_heads, rows, head_dim] and log-sum-exp [chunks, kv_heads, rows]."""
    if queries.device.type == "cpu" and _FLASH is not None:
        # It works through (chunk, head) independently: a chunk's bits do not depend on how many there are.
        out, lse = _FLASH(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
        return out, lse
    scores = torch.matmul(queries * scale, keys.transpose(-1, -2)) + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp(), values), lse


def _flash() -> Any:
    packet = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return None if packet is None else packet.default


_FLASH = _flash()
