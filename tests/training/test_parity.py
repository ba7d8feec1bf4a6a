"""Training and inference compute the same draft (spec §F.7): catches length, position, label and mask errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.model.proposal import DraftSampling
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.protocol import RaggedRows
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.evaluate import replay_greedy
from k3dspark.training.loss import teacher_forced_logits
from k3dspark.training.shards import ShardStore
from small_training import small_draft


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_teacher_forced_logits_are_what_inference_computes(
    store: ShardStore, weights: LlamaWeights, causal: bool, kind: str
) -> None:
    batch = store.batch(store.train[:3], 4, 7, torch.Generator().manual_seed(0))
    model = small_draft(weights, batch.taps.flatten(0, 1), block_causal=causal, markov_head_type=kind)
    model.markov_head.markov_w2.weight.data.normal_(0, 0.1)
    model.requires_grad_(False)
    hidden = model.training_hidden(batch.taps, batch.anchor_ids, batch.anchors, batch.visible)
    logits = teacher_forced_logits(model, hidden, batch.anchor_ids, batch.labels)
    model.pack()
    checked = 0
    for n, sequence in enumerate(store.train[:3]):
        ids = store.rows("ids", sequence).long()
        for a, position in enumerate(batch.anchors[n].tolist()):
            if position == 0:
                continue  # padding
            cache = model.new_cache()
            cache.append(model.context_rows(batch.taps[n, :position], torch.arange(position)))
            # the same committed tokens the engine would have
            assert int(ids[position]) == int(batch.anchor_ids[n, a])
            alone = model.block_hidden([cache], ids[position][None], torch.tensor([position]))
            truth = batch.labels[n, a][None]
            served = teacher_forced_logits(model, alone, ids[position][None], truth)
            torch.testing.assert_close(served[0], logits[n, a], atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked >= 8


def test_recorded_rows_are_those_of_the_served_target(
    store: ShardStore, weights: LlamaWeights, deep_target: Path
) -> None:
    """Taps and final hidden states on record belong to the positions they are filed under (hazards 1 and 3)."""
    from k3dspark.training.pipeline import default_taps

    target = LlamaTarget(weights, default_taps(weights.shape.layers))
    sequence = store.train[0]
    ids = store.rows("ids", sequence).long()
    handle = target.open()
    output = target.forward(RaggedRows((handle,), (len(ids),), ids))
    recorded = store.rows("taps", sequence).float()
    torch.testing.assert_close(recorded[:-1], output.taps[:-1], atol=2e-2, rtol=2e-3)
    start = sequence.answer_start - sequence.start
    logits = target.unembed(store.rows("final", sequence).float())[start:-1]
    torch.testing.assert_close(logits, output.logits[start:-1], atol=5e-2, rtol=1e-2)
    normalizer = store.rows("log_normalizer", sequence)[start:-1]
    torch.testing.assert_close(normalizer, output.logits.logsumexp(-1)[start:-1], atol=1e-3, rtol=1e-3)


def test_replayed_acceptance_is_the_engines(store: ShardStore, weights: LlamaWeights) -> None:
    """Replaying a recorded greedy answer counts the rounds that the engine takes to decode it."""
    target = LlamaTarget(weights, [0, 1, 2, 3, 4])
    model = small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())
    model = model.requires_grad_(False)
    sequences = [s for s in store.train if s.greedy and s.end - s.answer_start >= 20][:3]
    assert sequences
    from k3dspark.training.pipeline import default_taps

    target = LlamaTarget(weights, default_taps(weights.shape.layers))
    engine = Engine(target, model)
    for sequence in sequences:
        ids = store.rows("ids", sequence).tolist()
        start = sequence.answer_start - sequence.start
        result = engine.generate(ids[:start], SamplingParams(max_new_tokens=len(ids) - start))
        assert list(result.token_ids) == ids[start:]
        replay = replay_greedy(model, store, [sequence])
        # blocks that reach past the record are not replayed, the engine decodes them
        assert 0 <= result.stats.rounds - replay.rounds <= model.block_size
        assert replay.accepted <= result.stats.accepted


def test_sampling_in_training_hidden_matches_propose(store: ShardStore, weights: LlamaWeights) -> None:
    model = small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())
    model.requires_grad_(False)
    sequence = store.train[0]
    taps, ids = store.taps(sequence), store.rows("ids", sequence).long()
    position = sequence.answer_start - sequence.start + 2
    visible = (torch.arange(len(ids)) < position)[None, None]
    hidden = model.training_hidden(taps[None], ids[position][None, None], torch.tensor([[position]]), visible)
    trained = model.sample(hidden[0], ids[position][None], DraftSampling())
    cache = model.new_cache()
    cache.append(model.context_rows(taps[:position], torch.arange(position)))
    served = model.propose([cache], ids[position][None], torch.tensor([position]))
    assert torch.equal(trained.tokens, served.tokens)
