"""Reading training shards: sequences by hash into training and evaluation, batches of blocks around anchors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Sequence:
    """One conversation inside a shard: rows [start, end), answer from `answer_start` (absolute row)."""

    shard: int
    start: int
    end: int
    answer_start: int
    greedy: bool


@dataclass(frozen=True)
class BlockBatch:
    """A blocks in each of N sequences, everything padded to the longest (spec §F.1).

    taps [N, S, N_taps·d]; anchors [N, A] positions; anchor_ids [N, A]; visible bool [N, A, S] (j < anchor);
    labels [N, A, K] target ids (0 where unsupervised); supervised bool [N, A, K]; final [N, A, K, d] target
    hidden at the position before each label; log_normalizer [N, A, K].
    """

    taps: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    visible: Tensor
    labels: Tensor
    supervised: Tensor
    final: Tensor
    log_normalizer: Tensor


class ShardStore:
    """All whole shards of a directory; tensors are read from disk by slice."""

    def __init__(self, directory: Path, eval_fraction: float = 0.02) -> None:
        self.tap_scale: Tensor | None = None  # [N·d], multiplied into every tap read
        self.paths = sorted(directory.glob("*.safetensors"))
        if not self.paths:
            raise BadInput(
                f"no training shards in {directory}", "regeneration has written none yet", "run the data stage first"
            )
        self._handles: list[Any] = []
        self.train: list[Sequence] = []
        self.evaluation: list[Sequence] = []
        self.answer_tokens = 0
        for index, path in enumerate(self.paths):
            try:
                handle = safe_open(path, framework="pt")
                offsets = handle.get_tensor("offsets").tolist()
                starts = handle.get_tensor("answer_start").tolist()
                temperatures = handle.get_tensor("temperature").tolist()
                ids = handle.get_tensor("ids")
            except Exception as error:
                raise BadInput(f"{path} is not a training shard", str(error), "delete it and regenerate") from error
            self._handles.append(handle)
            for row, prompt_length in enumerate(starts):
                start, end = offsets[row], offsets[row + 1]
                sequence = Sequence(index, start, end, start + prompt_length, temperatures[row] == 0)
                self.answer_tokens += max(end - sequence.answer_start, 0)
                prompt = ids[start : start + prompt_length].numpy().tobytes()
                held_out = int.from_bytes(hashlib.sha256(prompt).digest()[:4], "big") < eval_fraction * 2**32
                if end - sequence.answer_start >= 3:
                    (self.evaluation if held_out else self.train).append(sequence)

    def rows(self, name: str, sequence: Sequence) -> Tensor:
        """Rows of one tensor for one sequence."""
        rows: Tensor = self._handles[sequence.shard].get_slice(name)[sequence.start : sequence.end]
        return rows

    def taps(self, sequence: Sequence) -> Tensor:
        """Taps [S, N·d] fp32 of one sequence, scaled."""
        taps = self.rows("taps", sequence).float()
        return taps if self.tap_scale is None else taps * self.tap_scale

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each id stands in an answer [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for sequence in self.train:
            answer = self.rows("ids", sequence)[sequence.answer_start - sequence.start :]
            counts += torch.bincount(answer.long(), minlength=vocab_size)
        return counts

    def epoch_order(self, seed: int, sequences_per_batch: int) -> list[list[Sequence]]:
        """Batches of similar length in random order (similar length: little padding)."""
        generator = torch.Generator().manual_seed(seed)
        shuffled = [self.train[i] for i in torch.randperm(len(self.train), generator=generator).tolist()]
        pool = sequences_per_batch * 16
        batches: list[list[Sequence]] = []
        for start in range(0, len(shuffled), pool):
            near = sorted(shuffled[start : start + pool], key=lambda s: s.end - s.answer_start)
            batches += [near[i : i + sequences_per_batch] for i in range(0, len(near), sequences_per_batch)]
        batches = [batch for batch in batches if len(batch) == sequences_per_batch]
        order = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in order]

    def batch(self, sequences: list[Sequence], max_anchors: int, block: int, generator: torch.Generator) -> BlockBatch:
        """Draw up to `max_anchors` anchors per sequence without replacement and gather what the loss needs."""
        longest = max(s.end - s.start for s in sequences)
        chosen = [draw_anchors(s, max_anchors, generator) for s in sequences]
        width = max(len(c) for c in chosen)
        n = len(sequences)
        width_of_taps = self.taps(sequences[0]).shape[1]
        d = self.rows("final", sequences[0]).shape[1]
        taps = torch.zeros(n, longest, width_of_taps)
        final = torch.zeros(n, width, block, d, dtype=torch.float32)
        anchors, anchor_ids = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.long)
        labels = torch.zeros(n, width, block, dtype=torch.long)
        supervised = torch.zeros(n, width, block, dtype=torch.bool)
        normalizer = torch.zeros(n, width, block)
        for row, (sequence, positions) in enumerate(zip(sequences, chosen, strict=True)):
            length, count = sequence.end - sequence.start, len(positions)
            ids = self.rows("ids", sequence).long()
            taps[row, :length] = self.taps(sequence)
            anchors[row, :count], anchor_ids[row, :count] = positions, ids[positions]
            target = positions[:, None] + torch.arange(block)  # rows whose prediction the slots imitate
            inside = target + 1 < length
            labels[row, :count] = ids[(target + 1).clamp(max=length - 1)].masked_fill(~inside, 0)
            supervised[row, :count] = inside
            clamped = target.clamp(max=length - 1)
            final[row, :count] = self.rows("final", sequence)[clamped].float()
            normalizer[row, :count] = self.rows("log_normalizer", sequence)[clamped]
        visible = torch.arange(longest) < anchors[..., None]
        return BlockBatch(taps, anchors, anchor_ids, visible, labels, supervised, final, normalizer)


def draw_anchors(sequence: Sequence, limit: int, generator: torch.Generator) -> Tensor:
    """Sorted positions a (relative) with a and a+1 inside the answer, at most `limit`, without replacement."""
    first, last = sequence.answer_start - sequence.start, sequence.end - sequence.start - 2
    count = last - first + 1
    picked = torch.randperm(count, generator=generator)[:limit]
    return picked.sort().values + first
