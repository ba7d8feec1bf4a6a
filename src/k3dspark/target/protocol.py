"""What decoding needs from a verified model, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

State = tuple[torch.Tensor, ...]  # what a target keeps of some rows


@dataclass(frozen=True)
class RaggedRows:
    """Rows of one or more sequences for one target forward, token-major.

    Sequence `sequences[i]` contributes `lengths[i]` consecutive rows; they continue that sequence at its
    committed length, so positions need not be passed. `logit_rows` picks the rows (indices into the token-major
    order) whose logits are wanted; None means all.
    """

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    token_ids: torch.Tensor  # int64 [R], R = sum(lengths)
    logit_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """logits fp32 [R or len(logit_rows), V]; taps [R, N*d], ascending layer order, in the target's dtype."""

    logits: torch.Tensor
    taps: torch.Tensor


class Target(Protocol):
    """A verified model. One uncommitted forward per sequence at a time: `forward`, then `commit`, then again."""

    @property
    def tap_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows [..., d] of token ids [...]."""
        ...

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., V] of final-normed hidden states [..., d]."""
        ...

    def open(self, capacity: int = 0) -> int:
        """A handle for a new empty sequence; `capacity` tokens are reserved as a hint, growth is automatic."""
        ...

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        ...

    def forward(self, rows: RaggedRows) -> TargetOutput:
        """Run rows after the committed tokens of their sequences. State is provisional until `commit`."""
        ...

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        ...

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        ...


@runtime_checkable
class CopiesRows(Target, Protocol):
    """A target whose rows are made of nothing but what came before them, kept row by row: they can serve again.

    A recurrent state stands for a whole sequence and cannot be cut, so not every target has these two.
    """

    def copy_rows(self, sequence: int, start: int, count: int) -> State:
        """A copy of the committed rows `start` … `start + count - 1`."""
        ...

    def paste_rows(self, sequence: int, state: State) -> None:
        """Append copied rows as committed ones: at the positions that they had, after the tokens that they had."""
        ...
