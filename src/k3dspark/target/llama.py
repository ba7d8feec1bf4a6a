"""Lean, exact forward of Llama-family models (Llama, SmolLM2, Qwen2, Qwen3) with its own cache.

Exact by construction: every linear map runs through tiles of one fixed number of rows (padding rows are discarded),
attention over key chunks of one fixed size (`target/attention.py`). So the logits and taps of a token are the same
bits however the tokens were split into calls, whatever else was in the call, and however far the sequence grew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from k3dspark.target.attention import KeyValueCache, attend, chunk_mask
from k3dspark.target.checks import check_finite, check_rows, check_taps, not_open, wrong_commit
from k3dspark.target.layer import PackedLayer, RmsNorm, padded_head, rotate, silu_product
from k3dspark.target.packed import PackedLinear
from k3dspark.target.protocol import RaggedRows, TargetOutput
from k3dspark.target.weights import LlamaWeights

INEXACT_TILE_ROWS = 64


@dataclass(frozen=True)
class _Segment:
    """Rows low..high of a tile belong to one sequence."""

    cache: KeyValueCache
    low: int
    high: int
    chunks: int  # that these rows can see
    mask: torch.Tensor  # as from chunk_mask, for every row of the tile
    pieces: tuple[tuple[int, int, int, int], ...]  # where the rows go: (chunk, first slot, first row, rows)


@dataclass(frozen=True)
class _Tile:
    """Rows that go through every layer together; `count` of them are real, from row `first` of the call."""

    first: int
    count: int
    hidden: torch.Tensor  # [rows, d], updated in place by every layer
    rotation: torch.Tensor  # complex64 [rows, head_dim / 2]
    query_rotation: torch.Tensor  # the same as [rows, 1, head_dim / 2]
    segments: tuple[_Segment, ...]


class LlamaTarget:
    """`Target` over `LlamaWeights`. The weights are repacked: drop the argument to free the originals.

    `tap_layer_ids` are layers, 0-based; a tap is the residual stream after that layer, before any norm. `exact=False`
    runs as many rows as the call has (up to 64 at once): faster, but the bits then depend on the shapes.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        tap_layer_ids: Sequence[int] = (),
        *,
        exact: bool = True,
        tile_rows: int = 8,
        chunk: int = 256,
        prepack: bool = True,
    ) -> None:
        self.shape = weights.shape
        self.exact = exact
        self.tile_rows = tile_rows
        self.chunk = chunk
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self._head_dim = padded_head(self.shape.head_dim)
        self._taps = check_taps(tap_layer_ids, self.shape.layers)
        self.embed_weight, self.head_weight = weights.embed, weights.head
        self._layers = tuple(PackedLayer(layer, self.shape, tile_rows, prepack) for layer in weights.layers)
        self._final_norm = RmsNorm(weights.final_norm, self.shape.rms_norm_eps)
        self._head = PackedLinear(weights.head, None, tile_rows, prepack)
        angles = torch.outer(torch.arange(self.shape.max_positions).float(), torch.tensor(self.shape.inv_freq))
        angles = F.pad(angles, (0, self._head_dim // 2 - angles.shape[1]))
        rotations = torch.complex(angles.cos(), angles.sin()) * self.shape.rope_multiplier
        self._rotations = rotations.to(self.device)  # [max_positions, head_dim / 2]
        self._sequences: dict[int, KeyValueCache] = {}
        self._pending: dict[int, int] = {}
        self._handles = itertools.count()

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self._taps

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [..., d] of token ids [...]."""
        return F.embedding(token_ids, self.embed_weight)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., V] of final-normed hidden states [..., d]."""
        flat = hidden.reshape(-1, self.hidden_size)
        logits = torch.empty(flat.shape[0], self.vocab_size, device=self.device)
        with torch.inference_mode():
            for first, rows, count in self._spans(flat.shape[0]):
                tile = flat[first : first + count]
                if rows > count:
                    tile = F.pad(tile, (0, 0, 0, rows - count))
                logits[first : first + count] = self._head(tile)[:count]
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def open(self, capacity: int = 0) -> int:
        """A handle for a new empty sequence; `capacity` tokens are reserved as a hint, growth is automatic."""
        cache = KeyValueCache(self.shape.layers, self.shape.kv_heads, self._head_dim, self.chunk, self.device)
        cache.reserve(min(capacity, self.max_positions))
        handle = next(self._handles)
        self._sequences[handle] = cache
        return handle

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return self._sequence(sequence).length

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        cache = self._sequence(sequence)
        pending = self._pending.pop(sequence, 0)
        if not 0 <= count <= pending:
            raise wrong_commit(sequence, count, pending)
        cache.length += count

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        self._sequence(sequence)
        del self._sequences[sequence]
        self._pending.pop(sequence, None)

    def forward(self, rows: RaggedRows) -> TargetOutput:
        """Run rows after the committed tokens of their sequences; provisional until `commit`.

        Raises `BadInput` past `max_positions` or for a token id outside the vocabulary, `EngineFault` when the
        logits are not finite.
        """
        check_rows(rows, self.length, self._pending, self.max_positions, self.vocab_size)
        total = int(rows.token_ids.shape[0])
        width = self.hidden_size
        # Allocated outside inference mode: callers may train on them or write into them.
        taps = torch.empty(total, len(self._taps) * width, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            tiles = self._tiles(rows)
            for index, layer in enumerate(self._layers):
                for tile in tiles:
                    self._run_layer(index, layer, tile)
                if index in self._taps:
                    column = self._taps.index(index) * width
                    for tile in tiles:
                        last = tile.first + tile.count
                        taps[tile.first : last, column : column + width] = tile.hidden[: tile.count]
            kept = [self._final_norm(tile.hidden)[: tile.count] for tile in tiles]
            final = torch.cat(kept) if kept else torch.empty(0, width, dtype=self.dtype, device=self.device)
            if rows.logit_rows is not None:
                final = final[rows.logit_rows]
        logits = self.unembed(final)
        check_finite(logits)
        for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
            self._pending[sequence] = count
        return TargetOutput(logits, taps)

    def _run_layer(self, index: int, layer: PackedLayer, tile: _Tile) -> None:
        s, hidden = self.shape, tile.hidden
        rows, head_dim = hidden.shape[0], self._head_dim
        group, half = s.heads // s.kv_heads, head_dim // 2
        qkv = layer.qkv(layer.input_norm(hidden)).float().view(rows, s.heads + 2 * s.kv_heads, head_dim)
        q, k = qkv.narrow(1, 0, s.heads), qkv.narrow(1, s.heads, s.kv_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q_pairs = torch.view_as_complex(q.view(rows, s.heads, half, 2)).view(rows, s.kv_heads, group, half)
        k_pairs = torch.view_as_complex(k.view(rows, s.kv_heads, half, 2)).transpose(0, 1)  # [kv_heads, rows, half]
        v = qkv.narrow(1, s.heads + s.kv_heads, s.kv_heads).transpose(0, 1)  # [kv_heads, rows, head_dim]
        rotated = torch.empty(s.kv_heads, rows, group, half, dtype=torch.complex64, device=hidden.device)
        rotate(q_pairs.transpose(0, 1), tile.query_rotation, rotated)
        queries = torch.view_as_real(rotated).view(s.kv_heads, rows * group, head_dim)

        attended = None
        for segment in tile.segments:
            cache = segment.cache
            for chunk, slot, low, count in segment.pieces:
                stored = cache.complex_keys[index][chunk].narrow(1, slot, count)
                rotate(k_pairs.narrow(1, low, count), tile.rotation.narrow(0, low, count), stored)
                cache.values[index][chunk].narrow(1, slot, count).copy_(v.narrow(1, low, count))
            keys = cache.keys[index].narrow(0, 0, segment.chunks)
            values = cache.values[index].narrow(0, 0, segment.chunks)
            result = attend(queries, keys, values, segment.mask, s.head_dim**-0.5)
            result = result.reshape(rows, -1)  # heads in the order (group, kv_head), as `layer.out` reads them
            if attended is None:
                attended = result
            else:
                attended[segment.low : segment.high] = result[segment.low : segment.high]
        assert attended is not None
        hidden += layer.out(attended.to(hidden.dtype))
        hidden += layer.down(silu_product(layer.gate_up(layer.post_norm(hidden))))

    def _sequence(self, sequence: int) -> KeyValueCache:
        if sequence not in self._sequences:
            raise not_open(sequence)
        return self._sequences[sequence]

    def _spans(self, total: int) -> Iterator[tuple[int, int, int]]:
        """(first row, rows of the tile with padding, real rows) for `total` rows."""
        step = self.tile_rows if self.exact else INEXACT_TILE_ROWS
        for first in range(0, total, step):
            count = min(step, total - first)
            yield first, step if self.exact else count, count

    def _tiles(self, rows: RaggedRows) -> list[_Tile]:
        owners = []  # (cache, position) of every row
        for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
            cache = self._sequence(sequence)
            cache.reserve(cache.length + count)
            owners += [(cache, cache.length + offset) for offset in range(count)]
        tiles = []
        for first, height, count in self._spans(len(owners)):
            mine = owners[first : first + count]
            padding = [0] * (height - count)
            positions = torch.tensor([position for _, position in mine] + padding, device=self.device)
            ids = F.pad(rows.token_ids[first : first + count].to(self.device), (0, height - count))
            segments, low = [], 0
            for _, same in itertools.groupby(mine, key=lambda owner: id(owner[0])):
                members = list(same)
                segments.append(self._segment(*members[0], low, low + len(members), height))
                low += len(members)
            rotation = self._rotations[positions]
            tiles.append(_Tile(first, count, self.embed(ids), rotation, rotation[:, None], tuple(segments)))
        return tiles

    def _segment(self, cache: KeyValueCache, start: int, low: int, high: int, height: int) -> _Segment:
        """Rows low..high of a tile, the first of them at position `start` of its sequence."""
        chunks = (start + high - low - 1) // self.chunk + 1
        limits = torch.arange(start - low, start - low + height, device=self.device)
        mask = chunk_mask(limits, self.shape.heads // self.shape.kv_heads, chunks, self.chunk)
        pieces, row = [], low
        while row < high:
            chunk, slot = divmod(start + row - low, self.chunk)
            count = min(high - row, self.chunk - slot)
            pieces.append((chunk, slot, row, count))
            row += count
        return _Segment(cache, low, high, chunks, mask, tuple(pieces))
