"""Lean, exact forward of Llama-family models (Llama, SmolLM2, Qwen2, Qwen3) with its own cache.

Exact by construction: the logits and taps of a token are the same bits however the tokens were split into calls,
whatever else was in the call, and however far the sequence grew. Our own kernels treat every row by itself
(`target/fused.py`). PyTorch's choose by shape, so without ours every linear map runs through tiles of one fixed number
of rows (padding rows are discarded), attention over key chunks of one fixed size (`target/attention.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from k3dspark.errors import BadInput
from k3dspark.model.packed import PackedLinear, can_widen
from k3dspark.target.attention import KeyValueCache, attend, chunk_mask
from k3dspark.target.checks import check_finite, check_rows, check_taps, wrong_commit
from k3dspark.target.fused import FusedLayers
from k3dspark.target.layer import PackedLayer, RmsNorm, Workspace, padded_head, rotate, silu_product, unit_rows
from k3dspark.target.protocol import RaggedRows, State, TargetOutput
from k3dspark.target.sequences import Sequences
from k3dspark.target.weights import LlamaWeights

INEXACT_TILE_ROWS = 64
CHUNK_STEP = 16  # floats of a cache line: a row of scores must not start inside one


@dataclass(frozen=True)
class _Piece:
    """Rows of a segment that lie in one chunk: views of where they come from and where they go."""

    k_pairs: torch.Tensor  # of the workspace
    v: torch.Tensor
    rotation: torch.Tensor
    stored_keys: tuple[torch.Tensor, ...]  # per layer; complex64
    stored_values: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Segment:
    """Rows low..high of a tile belong to one sequence."""

    low: int
    high: int
    keys: tuple[torch.Tensor, ...]  # per layer, the chunks that these rows can see
    values: tuple[torch.Tensor, ...]
    mask: torch.Tensor  # as from chunk_mask, for every row of the tile
    queries: torch.Tensor  # of the workspace, expanded to the chunks
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class _Tile:
    """Rows that go through every layer together; `count` of them are real, from row `first` of the call."""

    first: int
    count: int
    hidden: torch.Tensor  # [rows, d], updated in place by every layer
    workspace: Workspace
    query_rotation: torch.Tensor  # complex64 [rows, 1, head_dim / 2]
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
        int8: bool = False,
    ) -> None:
        if tile_rows.bit_count() != 1 or chunk < 1 or chunk % CHUNK_STEP:
            raise BadInput(
                f"a tile of {tile_rows} rows over chunks of {chunk} keys is not exact",
                f"tile_rows must be a power of two, chunk a multiple of {CHUNK_STEP}",
                "correct the arguments",
            )
        self.shape = weights.shape
        self.exact = exact
        self.tile_rows = tile_rows
        self.chunk = chunk
        # bfloat16 weights that our kernel widens multiply fp32 activations: nothing else is ever rounded.
        self.dtype = torch.float32 if prepack and can_widen(weights.embed) else weights.embed.dtype
        self.device = weights.embed.device
        self._head_dim = padded_head(self.shape.head_dim)
        self._taps = check_taps(tap_layer_ids, self.shape.layers)
        self.embed_weight, self.head_weight = weights.embed, weights.head
        self._layers = tuple(PackedLayer(layer, self.shape, tile_rows, prepack, int8) for layer in weights.layers)
        self._final_norm = RmsNorm(weights.final_norm, self.shape.rms_norm_eps)
        self._head = PackedLinear(weights.head, None, tile_rows, prepack, int8)
        angles = torch.outer(torch.arange(self.shape.max_positions).float(), torch.tensor(self.shape.inv_freq))
        angles = F.pad(angles, (0, self._head_dim // 2 - angles.shape[1]))
        rotations = torch.complex(angles.cos(), angles.sin()) * self.shape.rope_multiplier
        self._rotations = rotations.to(self.device)  # [max_positions, head_dim / 2]
        self._floor = torch.tensor([[(self.hidden_size * self.shape.rms_norm_eps) ** 0.5]], device=self.device)
        self._scale = self.shape.head_dim**-0.5
        self._fused: FusedLayers | None = None
        if all(layer.native for layer in self._layers) and self._head.native is not None:
            self._fused, self.tile_rows = FusedLayers(self._layers, self.shape, self._rotations, chunk), 1
        self._workspaces: dict[int, Workspace] = {}  # by the rows of a tile
        self._sequences: Sequences[KeyValueCache] = Sequences()
        self._pending: dict[int, int] = {}

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
        return F.embedding(token_ids, self.embed_weight).to(self.dtype)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., V] of final-normed hidden states [..., d]."""
        flat = hidden.reshape(-1, self.hidden_size)
        logits = torch.empty(flat.shape[0], self.vocab_size, device=self.device)
        if self._fused is not None:
            self._fused.product(self._head, flat, logits)
            return logits.view(*hidden.shape[:-1], self.vocab_size)
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
        return self._sequences.open(cache)

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return self._sequences[sequence].length

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        cache = self._sequences[sequence]
        pending = self._pending.pop(sequence, 0)
        if not 0 <= count <= pending:
            raise wrong_commit(sequence, count, pending)
        cache.length += count

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        self._sequences.close(sequence)
        self._pending.pop(sequence, None)

    def copy_rows(self, sequence: int, start: int, count: int) -> State:
        """Keys and values of the committed rows `start` … `start + count - 1`."""
        return (self._sequences[sequence].copy(start, count),)

    def paste_rows(self, sequence: int, state: State) -> None:
        """Append copied rows: the bits that running their tokens here would have given."""
        with torch.inference_mode():  # as the rows of a forward are written
            self._sequences[sequence].append(*state)

    def forward(self, rows: RaggedRows) -> TargetOutput:
        """Run rows after the committed tokens of their sequences; provisional until `commit`.

        Raises `BadInput` past `max_positions` or for a token id outside the vocabulary, `EngineFault` when the
        logits are not finite.
        """
        check_rows(rows, self.length, self._pending, self.max_positions, self.vocab_size)
        total = int(rows.token_ids.shape[0])
        # Allocated outside inference mode: callers may train on them or write into them.
        taps = torch.empty(total, len(self._taps) * self.hidden_size, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            final = self._run_fused(rows, taps) if self._fused is not None else self._run_tiles(rows, taps)
            if rows.logit_rows is not None:
                final = final[rows.logit_rows]
        logits = self.unembed(final)
        check_finite(logits)
        for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
            self._pending[sequence] = count
        return TargetOutput(logits, taps)

    def _run_fused(self, rows: RaggedRows, taps: torch.Tensor) -> torch.Tensor:
        """Final-normed hidden states [R, d]; `taps` is filled."""
        assert self._fused is not None
        width, owners, positions = self.hidden_size, list[KeyValueCache](), list[int]()
        for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
            cache = self._sequences[sequence]
            cache.reserve(cache.length + count)
            owners += [cache] * count
            positions += range(cache.length, cache.length + count)
        hidden = self.embed(rows.token_ids.to(self.device))

        def tap(layer: int, part: slice, values: torch.Tensor) -> None:
            if layer in self._taps:
                column = self._taps.index(layer) * width
                taps[part, column : column + width] = values

        if owners:
            self._fused.run(hidden, owners, torch.tensor(positions), tap)
        return self._fused.norm(hidden, self._final_norm)

    def _run_tiles(self, rows: RaggedRows, taps: torch.Tensor) -> torch.Tensor:
        """Final-normed hidden states [R, d]; `taps` is filled."""
        width = self.hidden_size
        tiles = self._tiles(rows)
        for index, layer in enumerate(self._layers):
            self._run_layer(index, layer, tiles)
            if index in self._taps:
                column = self._taps.index(index) * width
                for tile in tiles:
                    last = tile.first + tile.count
                    taps[tile.first : last, column : column + width] = tile.hidden[: tile.count]
        kept = [self._final_norm(tile.hidden)[: tile.count] for tile in tiles]
        return torch.cat(kept) if kept else torch.empty(0, width, dtype=self.dtype, device=self.device)

    def _run_layer(self, index: int, layer: PackedLayer, tiles: Sequence[_Tile]) -> None:
        # One matrix at a time for all tiles: it stays in the processor's cache while a prompt passes through.
        floor = self._floor
        qkv = [layer.qkv(layer.into_attention(unit_rows(tile.hidden, floor))) for tile in tiles]
        attended = [self._attend(index, layer, tile, rows) for tile, rows in zip(tiles, qkv, strict=True)]
        for tile, rows in zip(tiles, attended, strict=True):
            tile.hidden.add_(layer.out(rows))
        inner = [silu_product(layer.gate_up(layer.into_mlp(unit_rows(tile.hidden, floor)))) for tile in tiles]
        for tile, rows in zip(tiles, inner, strict=True):
            tile.hidden.add_(layer.down(rows))

    def _attend(self, index: int, layer: PackedLayer, tile: _Tile, fused: torch.Tensor) -> torch.Tensor:
        """Store the tile's keys and values and attend; `fused` is q, k and v side by side, one row per token."""
        work, rows = tile.workspace, fused.shape[0]
        work.fused.copy_(fused)
        if layer.q_norm is not None and layer.k_norm is not None:
            work.q.copy_(layer.q_norm(work.q))
            work.k.copy_(layer.k_norm(work.k))
        rotate(work.q_pairs, tile.query_rotation, work.rotated)
        attended = None
        for segment in tile.segments:
            for piece in segment.pieces:
                rotate(piece.k_pairs, piece.rotation, piece.stored_keys[index])
                piece.stored_values[index].copy_(piece.v)
            result = attend(segment.queries, segment.keys[index], segment.values[index], segment.mask, self._scale)
            result = result.reshape(rows, -1)  # heads in the order (group, kv_head), as `layer.out` reads them
            if attended is None:
                attended = result
            else:
                attended[segment.low : segment.high] = result[segment.low : segment.high]
        assert attended is not None
        return attended.to(fused.dtype)

    def _spans(self, total: int) -> Iterator[tuple[int, int, int]]:
        """(first row, rows of the tile with padding, real rows) for `total` rows."""
        step = self.tile_rows if self.exact else INEXACT_TILE_ROWS
        for first in range(0, total, step):
            count = min(step, total - first)
            yield first, step if self.exact else count, count

    def _tiles(self, rows: RaggedRows) -> list[_Tile]:
        owners = []  # (cache, position) of every row
        for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
            cache = self._sequences[sequence]
            cache.reserve(cache.length + count)
            owners += [(cache, cache.length + offset) for offset in range(count)]
        tiles = []
        for first, height, count in self._spans(len(owners)):
            mine = owners[first : first + count]
            padding = [0] * (height - count)
            positions = torch.tensor([position for _, position in mine] + padding, device=self.device)
            ids = F.pad(rows.token_ids[first : first + count].to(self.device), (0, height - count))
            rotation, work = self._rotations[positions], self._workspace(height)
            segments, low = [], 0
            for _, same in itertools.groupby(mine, key=lambda owner: id(owner[0])):
                members = list(same)
                segments.append(self._segment(*members[0], low, low + len(members), rotation, work))
                low += len(members)
            tiles.append(_Tile(first, count, self.embed(ids), work, rotation[:, None], tuple(segments)))
        return tiles

    def _workspace(self, rows: int) -> Workspace:
        if rows not in self._workspaces:
            self._workspaces[rows] = Workspace(self.shape, rows, self.device)
        return self._workspaces[rows]

    def _segment(
        self, cache: KeyValueCache, start: int, low: int, high: int, rotation: torch.Tensor, work: Workspace
    ) -> _Segment:
        """Rows low..high of a tile, the first of them at position `start` of its sequence."""
        chunks = (start + high - low - 1) // self.chunk + 1
        limits = torch.arange(start - low, start - low + rotation.shape[0], device=self.device)
        mask = chunk_mask(limits, self.shape.heads // self.shape.kv_heads, chunks, self.chunk)
        pieces = []
        for first, chunk, slots in cache.pieces(start, high - low):
            rows = slice(low + first, low + first + slots.stop - slots.start)
            pieces.append(
                _Piece(
                    work.k_pairs[:, rows],
                    work.v[:, rows],
                    rotation[rows],
                    cache.complex_keys[:, chunk, :, slots].unbind(0),
                    cache.values[:, chunk, :, slots].unbind(0),
                )
            )
        keys, values = cache.keys[:, :chunks].unbind(0), cache.values[:, :chunks].unbind(0)
        queries = work.queries.expand(chunks, *work.queries.shape)
        return _Segment(low, high, keys, values, mask, queries, tuple(pieces))
