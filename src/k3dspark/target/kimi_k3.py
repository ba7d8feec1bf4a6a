"""Kimi K3 behind the `Target` protocol: cache, rollback and taps in either stream, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from k3dspark.errors import BadInput
from k3dspark.model.cache import LatentCache
from k3dspark.target.checks import check_finite, check_rows, check_taps, wrong_commit
from k3dspark.target.kimi_k3_kda import DeltaRows, DeltaState
from k3dspark.target.kimi_k3_model import Batch, KimiK3Model, TapStream
from k3dspark.target.protocol import RaggedRows, TargetOutput
from k3dspark.target.sequences import Sequences

CACHE_BLOCK = 1024  # tokens


@dataclass(frozen=True)
class _Pending:
    """Rows of the last forward of a sequence."""

    count: int = 0
    delta: DeltaRows | None = None  # [L, count, …]
    latent: torch.Tensor | None = None  # [L, count, W]


@dataclass
class _Sequence:
    delta: DeltaState  # [L, …] of the KDA layers after the committed tokens
    latent: LatentCache  # committed rows of the MLA layers
    length: int = 0
    pending: _Pending | None = None


class KimiK3Target:
    """`Target` over a `KimiK3Model`.

    A forward writes into no state: it leaves its rows beside the sequence. `commit` appends those that are kept to the
    MLA rows, and advances the recurrent memories and the convolutions of all KDA layers by them, in one pass over the
    keys and values that the forward left. So nothing of a rejected row can stay behind, and no layer runs twice.

    `stream` says what is tapped, see `KimiK3Model.stack`. Results are not bitwise independent of how tokens were split
    into calls (`exact` is False): rounding decides near-ties, also those of the router.
    """

    exact = False

    def __init__(self, model: KimiK3Model, tap_layer_ids: Sequence[int] = (), stream: TapStream = "prefix") -> None:
        if stream not in ("prefix", "attn_res"):
            raise BadInput(f"unknown tap stream {stream!r}", "it is prefix or attn_res", "correct aux_hidden_stream")
        self.model, self.shape, self.stream = model, model.shape, stream
        self.embed_weight, self.head_weight = model.embed_weight, model.head_weight
        self._taps = check_taps(tap_layer_ids, model.shape.layers)
        self._sequences: Sequences[_Sequence] = Sequences()

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
        return self.model.logits(hidden).float()

    def open(self, capacity: int = 0) -> int:
        """A handle for a new empty sequence; the cache grows by blocks, whatever the hint."""
        weight, shape = self.embed_weight, self.shape
        return self._sequences.open(
            _Sequence(
                DeltaState.empty(shape, (len(shape.kda_layers),), weight.dtype, weight.device),
                LatentCache(len(shape.mla_layers), shape.row_width, weight.dtype, weight.device, CACHE_BLOCK),
            )
        )

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return self._sequences[sequence].length

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        self._sequences.close(sequence)

    def forward(self, rows: RaggedRows) -> TargetOutput:
        """Run rows after the committed tokens of their sequences; provisional until `commit`.

        Raises `BadInput` past `max_positions` or for a token id outside the vocabulary, `EngineFault` when the
        logits are not finite.
        """
        waiting = {handle for handle, sequence in self._sequences.items() if sequence.pending is not None}
        check_rows(rows, self.length, waiting, self.max_positions, self.vocab_size)
        ids = rows.token_ids.to(self.embed_weight.device)
        wanted = slice(None) if rows.logit_rows is None else rows.logit_rows.to(ids.device)
        running = [(self._sequences[h], n) for h, n in zip(rows.sequences, rows.lengths, strict=True) if n]
        if running:
            batch = self._batch([sequence for sequence, _ in running], tuple(count for _, count in running))
            with torch.no_grad():
                output = self.model.stack(ids, batch, self._taps, self.stream)
                logits = self.unembed(output.hidden[wanted])
            check_finite(logits)
        for handle in rows.sequences:
            self._sequences[handle].pending = _Pending()
        if not running:
            return self._nothing()
        first = 0
        for index, (sequence, count) in enumerate(running):
            delta = output.delta.of(index, count) if output.delta is not None else None
            sequence.pending = _Pending(count, delta, output.latent[:, first : first + count])
            first += count
        return TargetOutput(logits, output.taps)

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        state = self._sequences[sequence]
        pending = state.pending
        if pending is None or not 0 <= count <= pending.count:
            raise wrong_commit(sequence, count, 0 if pending is None else pending.count)
        state.pending = None
        with torch.no_grad():
            if pending.latent is not None:
                state.latent.append(pending.latent[:, :count])
            if pending.delta is not None:
                state.delta = pending.delta.after(state.delta, count)
        state.length += count

    def _nothing(self) -> TargetOutput:
        weight = self.embed_weight
        taps = weight.new_empty(0, len(self._taps) * self.hidden_size)
        return TargetOutput(torch.empty(0, self.vocab_size, device=weight.device), taps)

    def _batch(self, sequences: Sequence[_Sequence], lengths: tuple[int, ...]) -> Batch:
        width = max(lengths)
        slots = [index * width + row for index, count in enumerate(lengths) for row in range(count)]
        layers = range(len(self.shape.mla_layers))
        return Batch(
            lengths,
            torch.tensor(slots, device=self.embed_weight.device),
            DeltaState(
                torch.stack([sequence.delta.inputs for sequence in sequences], 1),
                torch.stack([sequence.delta.memory for sequence in sequences], 1),
            ),
            [[sequence.latent.chunks(layer) for sequence in sequences] for layer in layers],
        )
