"""What every target refuses before and after a forward."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from k3dspark.errors import BadInput, EngineFault
from k3dspark.target.protocol import RaggedRows


def check_taps(tap_layer_ids: Sequence[int], layers: int) -> tuple[int, ...]:
    """The tap layers in ascending order. Raises `BadInput` for one outside 0..layers-1 or given twice."""
    wrong = [layer for layer in tap_layer_ids if not 0 <= layer < layers]
    if wrong or len(set(tap_layer_ids)) != len(tap_layer_ids):
        raise BadInput(
            f"tap layers {list(tap_layer_ids)} do not fit the target",
            f"layers 0 to {layers - 1} can be tapped, each once",
            "use the draft that was trained for this target",
        )
    return tuple(sorted(tap_layer_ids))


def check_rows(
    rows: RaggedRows, length_of: Callable[[int], int], pending: Container[int], max_positions: int, vocab_size: int
) -> None:
    """Raises `BadInput` for too many tokens or a foreign token id, `EngineFault` for a malformed call."""
    if len(rows.sequences) != len(rows.lengths) or sum(rows.lengths) != rows.token_ids.shape[0]:
        raise EngineFault("rows do not add up", "lengths, sequences and token ids disagree", "report this bug")
    if len(set(rows.sequences)) != len(rows.sequences):
        raise EngineFault("a sequence appears twice in one call", f"sequences {rows.sequences}", "report this bug")
    for sequence, count in zip(rows.sequences, rows.lengths, strict=True):
        end = length_of(sequence) + count
        if sequence in pending:
            raise EngineFault(f"sequence {sequence} has uncommitted rows", "commit was not called", "report this bug")
        if end > max_positions:
            raise BadInput(
                f"{end} tokens do not fit the model",
                f"it has {max_positions} positions",
                "shorten the prompt or ask for fewer new tokens",
            )
    if rows.token_ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(rows.token_ids))
        if low < 0 or high >= vocab_size:
            raise BadInput(
                f"token id {low if low < 0 else high} is outside the vocabulary",
                f"the target knows the ids 0 to {vocab_size - 1}",
                "use the tokenizer that belongs to this model",
            )


def check_finite(logits: torch.Tensor) -> None:
    """Raises `EngineFault` when any logit is NaN or infinite."""
    # One pass: a sum is finite only if every term is (fp32 logits are far from overflowing it).
    if not bool(torch.isfinite(logits.sum())):
        raise EngineFault(
            "the target's logits are not finite",
            "the weights or the cache hold NaN or infinity, or the dtype overflowed",
            "check the model files, or load the target in float32",
        )


def wrong_commit(sequence: int, count: int, pending: int) -> EngineFault:
    return EngineFault(
        f"cannot commit {count} rows", f"the last forward of sequence {sequence} ran {pending}", "report this bug"
    )
