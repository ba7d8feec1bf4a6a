"""The DSpark training loss: cross-entropy, L1 against the target's distribution, confidence (spec §F.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from k3dspark.model.draft import K3DSparkModel
from k3dspark.training.shards import BlockBatch


@dataclass(frozen=True)
class LossWeights:
    """L = ce·L_ce + l1·L_tv + soft·L_soft + confidence·L_conf, slot weights exp(−k/decay).

    L_soft = −Σ_v p(v) log q(v) is not in the published recipe: one label a context is memorised when answers are few,
    the target's whole distribution is not.
    """

    ce: float = 0.1
    l1: float = 0.9
    soft: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class LossTerms:
    """The scalar to minimise, its parts, and per-slot figures (all detached but `total`)."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    acceptance: Tensor  # [K] mean of c* = 1 − ½‖q − p‖₁ over supervised slots
    matches: Tensor  # [K] share of slots whose draft argmax is the label


def block_loss(
    model: K3DSparkModel, batch: BlockBatch, weights: LossWeights, compute: torch.dtype = torch.float32
) -> LossTerms:
    """Loss of one batch of blocks; teacher-forced previous tokens, softmaxes in fp32.

    With `compute` bfloat16 the network's products run in it (autocast; the weights stay what they are), from the
    logits on everything is fp32 again.

    With a draft vocabulary, p outside it counts in full in ‖q − p‖₁ (there q is zero), and labels outside it
    carry no cross-entropy.
    """
    if model.lm_head is None:
        raise ValueError("training needs the target's lm_head")
    with torch.autocast(batch.taps.device.type, torch.bfloat16, enabled=compute == torch.bfloat16):
        hidden = model.training_hidden(batch.taps, batch.anchor_ids, batch.anchors, batch.visible)  # [N, A, K, d]
        feature, embedded = markov_features(model, hidden, batch.anchor_ids, batch.labels)
    if compute == torch.bfloat16:
        hidden, feature, embedded = hidden.float(), feature.float(), embedded.float()
    keep = batch.supervised
    hidden, feature, embedded = hidden[keep], feature[keep], embedded[keep]  # [M, ·]
    slots = torch.arange(model.block_size).expand_as(keep)[keep]
    omega = torch.exp(-slots.float() / weights.decay)
    omega = omega / global_sum(omega.sum())
    columns = _columns(model, batch.labels[keep])
    distribution, figures = _DistributionLoss.apply(
        hidden, feature, model.markov_head.markov_w2.weight, model.lm_head,
        batch.final[keep], batch.log_normalizer[keep], columns, omega, weights,
    )  # fmt: skip
    nll, distance, matched = figures
    acceptance = (1 - distance / 2).clamp(0, 1)
    total = distribution
    confidence = torch.zeros(())
    if model.confidence_head is not None:
        g = model.confidence(hidden, embedded)
        confidence = (omega * F.binary_cross_entropy_with_logits(g, acceptance, reduction="none")).sum()
        total = total + weights.confidence * confidence
    return LossTerms(
        total=total,
        ce=(omega * nll).sum(),
        l1=(omega * distance).sum(),
        confidence=confidence.detach(),
        acceptance=_slot_means(acceptance, slots, model.block_size),
        matches=_slot_means(matched, slots, model.block_size),
    )


def global_sum(local: Tensor) -> Tensor:
    """Sum over all training processes: losses are normalised by the weight of the global batch (spec §F.2)."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(local)
    return local


class _DistributionLoss(torch.autograd.Function):
    """Σ ω(ce·(−log q(y)) + l1·‖q − p‖₁ + soft·(−Σ p log q)) over M slots, gradients formed on the way, row by row.

    One row of logits is V·4 bytes; keeping them for autograd would cost gigabytes and a dozen passes over memory.
    ∂/∂z = ω(ce·(q − 1_y) + l1·q(s − Σ q s) + soft·(q·Σp − p)), s = sign(q − p) (spec §F.2).
    """

    ROWS = 256

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, feature: Tensor, w2: Tensor, head: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        final, normalizer, columns, omega, weights = rest
        ce_weight, l1_weight, soft_weight = weights.ce, weights.l1, weights.soft
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head, bias_table = head.to(wide), w2.to(wide)
        d_hidden, d_feature, d_w2 = torch.empty_like(hidden), torch.empty_like(feature), torch.zeros_like(bias_table)
        figures = torch.empty(3, hidden.shape[0], dtype=wide)  # nll, distance, matched
        cross_entropies = torch.zeros(hidden.shape[0], dtype=wide)  # −Σ p log q, only where it is asked for
        for start in range(0, hidden.shape[0], _DistributionLoss.ROWS):
            rows = slice(start, start + _DistributionLoss.ROWS)
            h, e, column, weight = hidden[rows].to(wide), feature[rows].to(wide), columns[rows], omega[rows, None]
            known = column >= 0
            column = column.clamp(min=0)[:, None]
            logits = torch.addmm(h @ head.T, e, bias_table.T)  # [m, D]
            top = logits.argmax(-1, keepdim=True)
            normal = logits.logsumexp(-1, keepdim=True)
            figures[0, rows] = (normal - logits.gather(-1, column))[:, 0] * known
            figures[2, rows] = ((top == column)[:, 0] & known).to(wide)
            log_q = logits.sub_(normal)
            p = (final[rows].to(wide) @ head.T).sub_(normalizer[rows, None]).exp_()
            inside = p.sum(-1)
            outside = (1 - inside).clamp(min=0)
            soft = None
            if soft_weight:
                cross_entropies[rows] = -torch.einsum("mv,mv->m", p, log_q)
                soft = p * soft_weight
            q = log_q.exp_()
            difference = torch.sub(q, p, out=p)
            figures[1, rows] = difference.abs().sum(-1) + outside
            sign = difference.sign_()
            mean_sign = (q * sign).sum(-1, keepdim=True)
            # q·(ce·known + l1·(s − mean)), then −ce at the label
            flat = ce_weight * known + soft_weight * inside
            gradient = sign.sub_(mean_sign).mul_(l1_weight).add_(flat[:, None]).mul_(q)
            if soft is not None:
                gradient.sub_(soft)
            gradient.scatter_add_(-1, column, -ce_weight * known[:, None].to(wide))
            gradient.mul_(weight)
            d_hidden[rows] = (gradient @ head).to(hidden.dtype)
            d_feature[rows] = (gradient @ bias_table).to(feature.dtype)
            d_w2.addmm_(gradient.T, e)
        ctx.save_for_backward(d_hidden, d_feature, d_w2.to(w2.dtype))
        ctx.mark_non_differentiable(figures)
        total = (omega * (ce_weight * figures[0] + l1_weight * figures[1] + soft_weight * cross_entropies)).sum()
        return total, figures

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scale = gradients[0]
        d_hidden, d_feature, d_w2 = ctx.saved_tensors
        return (d_hidden * scale, d_feature * scale, d_w2 * scale, *([None] * 6))


def markov_features(model: K3DSparkModel, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """φ and W1 rows, both [N, A, K, r], with the true previous tokens [anchor, y_0 … y_{K−2}]."""
    previous = torch.cat([anchor_ids[..., None], labels[..., :-1]], -1)
    head = model.markov_head
    embedded = head.markov_w1(previous)
    if head.kind != "rnn":
        return head.step(embedded, hidden, None)[0], embedded
    state, features = head.start(tuple(hidden.shape[:-2])), []
    for k in range(hidden.shape[-2]):
        feature, state = head.step(embedded[..., k, :], hidden[..., k, :], state)
        features.append(feature)
    return torch.stack(features, -2), embedded


def teacher_forced_logits(model: K3DSparkModel, hidden: Tensor, anchor_ids: Tensor, labels: Tensor) -> Tensor:
    """Z [N, A, K, D] fp32: what inference computes when its previous tokens are the labels (spec §F.7)."""
    feature, _ = markov_features(model, hidden, anchor_ids, labels)
    return model.base_logits(hidden) + model.markov_head.bias(feature)


def _columns(model: K3DSparkModel, labels: Tensor) -> Tensor:
    """Draft-vocabulary column of each label, −1 where the draft vocabulary lacks it."""
    if model.d2t is None:
        return labels
    inverse = torch.full((model.config.vocab_size,), -1)
    inverse[model.d2t] = torch.arange(model.d2t.shape[0])
    return inverse[labels]


def _slot_means(values: Tensor, slots: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count).scatter_add_(0, slots, values)
    return sums / torch.bincount(slots, minlength=count).clamp(min=1)
