"""Acceptance of a draft on recorded conversations, without running the target again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling
from k3dspark.training.shards import Sequence, ShardStore


@dataclass(frozen=True)
class RecordedAcceptance:
    """Greedy rounds replayed on greedy answers: pooled counts over all sequences."""

    rounds: int
    accepted: int
    per_slot: tuple[float, ...]  # share of rounds that accepted slot k

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds, bonus token included."""
        return 1 + self.accepted / max(self.rounds, 1)


@torch.no_grad()
def replay_greedy(model: K3DSparkModel, store: ShardStore, sequences: list[Sequence]) -> RecordedAcceptance:
    """Walk each recorded greedy answer in rounds: draft a block at the anchor, accept what matches, move on.

    Exact for greedy decoding, because the answer on record is what the target would choose after any accepted
    prefix; only blocks that lie wholly inside the record count.
    """
    size = model.block_size
    per_slot = torch.zeros(size)
    rounds = accepted = 0
    for sequence in sequences:
        if not sequence.greedy:
            continue
        length, first = sequence.end - sequence.start, sequence.answer_start - sequence.start
        positions = torch.arange(first, max(length - size, first))
        if len(positions) < 1:
            continue
        ids = store.rows("ids", sequence).long()
        taps = store.taps(sequence)[None]
        visible = (torch.arange(length) < positions[:, None])[None]
        anchor_ids = ids[positions]
        hidden = model.training_hidden(taps, anchor_ids[None], positions[None], visible)[0]  # [A, K, d]
        tokens = model.sample(hidden, anchor_ids, DraftSampling()).tokens
        labels = ids[positions[:, None] + 1 + torch.arange(size)]
        counts = (tokens == labels).long().cumprod(-1).sum(-1).tolist()  # accepted at every anchor
        index = 0
        while index < len(counts):
            rounds += 1
            accepted += counts[index]
            per_slot[: counts[index]] += 1
            index += counts[index] + 1
    shares = tuple((per_slot / max(rounds, 1)).tolist())
    return RecordedAcceptance(rounds, accepted, shares)
