"""The loss of spec §F.2: values against the plain formula, gradients against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.loss import LossWeights, _DistributionLoss, block_loss, teacher_forced_logits
from k3dspark.training.shards import BlockBatch, ShardStore
from small_training import small_draft


def batch_of(store: ShardStore, block: int = 7) -> BlockBatch:
    return store.batch(store.train[:3], 5, block, torch.Generator().manual_seed(0))


def plain_loss(model: K3DSparkModel, batch: BlockBatch, weights: LossWeights) -> Tensor:
    """The formulas with whole tensors and autograd."""
    hidden = model.training_hidden(batch.taps, batch.anchor_ids, batch.anchors, batch.visible)
    logits = teacher_forced_logits(model, hidden, batch.anchor_ids, batch.labels)
    log_q = logits.log_softmax(-1)
    p = (model.base_logits(batch.final) - batch.log_normalizer[..., None]).exp()
    omega = batch.supervised * torch.exp(-torch.arange(model.block_size) / weights.decay)
    omega = omega / omega.sum()
    nll = -log_q.gather(-1, batch.labels[..., None])[..., 0]
    distance = (log_q.exp() - p).abs().sum(-1)
    previous = torch.cat([batch.anchor_ids[..., None], batch.labels[..., :-1]], -1)
    g = model.confidence(hidden, model.markov_head.markov_w1(previous))
    target = (1 - distance.detach() / 2).clamp(0, 1)
    conf = F.binary_cross_entropy_with_logits(g, target, reduction="none")
    soft = -(p * log_q).sum(-1)
    return (omega * (weights.ce * nll + weights.l1 * distance + weights.soft * soft + weights.confidence * conf)).sum()


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("mix", [LossWeights(), LossWeights(ce=0.3, l1=0.0, soft=0.7), LossWeights(0.2, 0.5, 0.3)])
def test_loss_and_gradients_are_those_of_the_formula(
    store: ShardStore, weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch, mix: LossWeights, rows: int
) -> None:
    monkeypatch.setattr(_DistributionLoss, "ROWS", rows)
    batch = batch_of(store)
    model = small_draft(weights, batch.taps.flatten(0, 1))
    model.markov_head.markov_w2.weight.data.normal_(0, 0.1)
    terms = block_loss(model, batch, mix)
    terms.total.backward()  # type: ignore[no-untyped-call]
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = plain_loss(model, batch, mix)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(terms.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert ours
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(ours[name], parameter.grad, atol=1e-3 * scale + 1e-7, rtol=1e-3)


def test_the_recorded_normalizer_makes_the_target_distribution_sum_to_one(
    store: ShardStore, weights: LlamaWeights
) -> None:
    batch = batch_of(store)
    model = small_draft(weights, batch.taps.flatten(0, 1))
    p = (model.base_logits(batch.final) - batch.log_normalizer[..., None]).exp().sum(-1)
    torch.testing.assert_close(p[batch.supervised], torch.ones(int(batch.supervised.sum())), atol=2e-2, rtol=0)


def test_embedding_and_head_stay_frozen(store: ShardStore, weights: LlamaWeights) -> None:
    batch = batch_of(store)
    model = small_draft(weights, batch.taps.flatten(0, 1))
    block_loss(model, batch, LossWeights()).total.backward()  # type: ignore[no-untyped-call]
    assert model.embed_tokens.weight.grad is None
    assert model.lm_head is not None
    assert not model.lm_head.requires_grad
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {"context_proj.weight", "context_norm.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "layers.1.self_attn.kv_b_proj.weight", "markov_head.markov_w1.weight"} <= trained  # fmt: skip


def test_a_draft_vocabulary_counts_the_targets_mass_outside_it(store: ShardStore, weights: LlamaWeights) -> None:
    batch = batch_of(store)
    model = small_draft(weights, batch.taps.flatten(0, 1))
    full = block_loss(model, batch, LossWeights(ce=0, l1=1, confidence=0))
    kept = torch.arange(0, model.config.vocab_size, 2)
    assert model.lm_head is not None
    model.lm_head = model.lm_head[kept]
    model.markov_head.markov_w2.weight = torch.nn.Parameter(model.markov_head.markov_w2.weight[kept])
    model.d2t = kept
    half = block_loss(model, batch, LossWeights(ce=0, l1=1, confidence=0))
    outside = (model.base_logits(batch.final) - batch.log_normalizer[..., None]).exp().sum(-1)
    assert float((1 - outside)[batch.supervised].mean()) > 0.1
    assert float(half.l1) > float(full.l1) * 0.5
    assert float(half.acceptance.max()) < 1.0
