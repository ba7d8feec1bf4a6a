"""What a wired draft proposes at anchors of recorded answers, and how likely it held the right tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3dspark.diagnosis.capture import Conversation
from k3dspark.diagnosis.wiring import Wiring
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling

EVERY = 3  # tokens between anchors: neighbouring ones tell nearly the same
COARSE = 6
SLOT_DECAY = 4.0  # weight exp(−k/4) of slot k, as in the training loss (spec §F.2)


@dataclass(frozen=True)
class Scores:
    """Sums over the anchors of each of P conversations.

    `accepted` [P]: draft tokens a greedy target keeps. `log_likelihood` [P]: log-probability of the target's own
    tokens under the draft, weighted mean over the slots. `anchors` [P].
    """

    anchors: NDArray[np.float64]
    accepted: NDArray[np.float64]
    log_likelihood: NDArray[np.float64]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted per block, over evenly spaced anchors; 1 without any."""
        return 1 + float(self.accepted.sum()) / max(float(self.anchors.sum()), 1)


@torch.inference_mode()
def replay(wiring: Wiring, conversations: Sequence[Conversation], every: int = EVERY, greedy: bool = True) -> Scores:
    """Draft a block at every third token of every answer whose next K tokens are on record.

    The answer is greedy, so it is what the target would say after any accepted prefix, and no target runs here.
    Without `greedy` the accepted tokens are left out (0), which saves half of the time.
    """
    model = wiring.model()
    totals = [_conversation(model, wiring, conversation, every, greedy) for conversation in conversations]
    anchors, accepted, likelihood = np.array(totals, dtype=np.float64).T
    return Scores(anchors, accepted, likelihood)


def join(parts: Sequence[Scores]) -> Scores:
    """Scores of several groups of conversations as one."""
    return Scores(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("anchors", "accepted", "log_likelihood")))


def _conversation(
    model: K3DSparkModel, wiring: Wiring, conversation: Conversation, every: int, greedy: bool
) -> tuple[float, float, float]:
    ids, size = conversation.ids, model.block_size
    anchors = torch.arange(conversation.answer_start, max(len(ids) - size, conversation.answer_start), every)
    if len(anchors) == 0:
        return 0.0, 0.0, 0.0
    taps = conversation.read(wiring.taps)
    visible = torch.arange(taps.shape[0]) < anchors[:, None]  # [A, S]
    anchor_ids = ids[anchors]
    positions = anchors + wiring.block_offset
    hidden = model.training_hidden(taps[None], anchor_ids[None], positions[None], visible[None])[0]  # [A, K, d]
    labels = ids[anchors[:, None] + 1 + torch.arange(size)]  # [A, K]
    accepted = 0.0
    if greedy:
        tokens = model.sample(hidden, anchor_ids, DraftSampling()).tokens
        accepted = float((tokens == labels).long().cumprod(-1).sum())
    return float(len(anchors)), accepted, float(_log_likelihood(model, hidden, anchor_ids, labels).sum())


def _log_likelihood(model: K3DSparkModel, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor:
    """Weighted mean over slots [A] of log q_k(label), previous tokens as the target chose them.

    Labels that the draft's vocabulary lacks count as 0 for every wiring alike.
    """
    previous = torch.cat([anchor_ids[:, None], labels[:, :-1]], 1)
    embedded = model.markov_head.markov_w1(previous)  # [A, K, r]
    state = model.markov_head.start((len(labels),))
    base = model.base_logits(hidden)
    columns, known = labels, torch.ones_like(labels, dtype=torch.bool)
    if model.d2t is not None:
        place = torch.full((model.config.vocab_size,), -1)
        place[model.d2t] = torch.arange(len(model.d2t))
        columns, known = place[labels].clamp(min=0), place[labels] >= 0
    found = []
    for k in range(labels.shape[1]):
        feature, state = model.markov_head.step(embedded[:, k], hidden[:, k], state)
        logits = base[:, k] + model.markov_head.bias(feature)
        found.append(logits.log_softmax(-1).gather(-1, columns[:, k, None])[:, 0])
    weights = torch.exp(-torch.arange(labels.shape[1]) / SLOT_DECAY)
    chosen = torch.where(known, torch.stack(found, 1), torch.zeros(()))
    return (chosen * weights).sum(-1) / weights.sum()
