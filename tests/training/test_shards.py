"""Anchors, labels and visibility as spec §F.1 has them."""

from __future__ import annotations

import torch

from k3dspark.training.prompts import overlaps
from k3dspark.training.regenerate import without_loop
from k3dspark.training.shards import ShardStore, draw_anchors


def test_anchors_have_their_first_label_inside_the_answer(store: ShardStore) -> None:
    for sequence in store.train:
        anchors = draw_anchors(sequence, 1000, torch.Generator().manual_seed(0))
        first, last = sequence.answer_start - sequence.start, sequence.end - sequence.start - 2
        assert anchors.tolist() == list(range(first, last + 1))


def test_labels_and_target_rows_follow_the_anchor(store: ShardStore) -> None:
    sequence = store.train[0]
    ids, final = store.rows("ids", sequence), store.rows("final", sequence).float()
    batch = store.batch([sequence], 6, 7, torch.Generator().manual_seed(1))
    for a, position in enumerate(batch.anchors[0].tolist()):
        assert int(batch.anchor_ids[0, a]) == int(ids[position])
        assert batch.visible[0, a].tolist() == [j < position for j in range(len(ids))]
        for k in range(7):
            inside = position + 1 + k < len(ids)
            assert bool(batch.supervised[0, a, k]) == inside
            if inside:
                assert int(batch.labels[0, a, k]) == int(ids[position + 1 + k])
                assert torch.equal(batch.final[0, a, k], final[position + k])


def test_supervised_slots_are_a_prefix_of_every_block(store: ShardStore) -> None:
    batch = store.batch(store.train[:4], 20, 7, torch.Generator().manual_seed(2))
    mask = batch.supervised.long()
    assert torch.equal(mask, mask.cumprod(-1))


def test_training_and_evaluation_share_no_prompt(store: ShardStore) -> None:
    def prompts(sequences: list) -> set:  # type: ignore[type-arg]
        return {tuple(store.rows("ids", s)[: s.answer_start - s.start].tolist()) for s in sequences}

    assert store.evaluation
    assert not prompts(store.train) & prompts(store.evaluation)


def test_an_epoch_uses_every_conversation_at_most_once(store: ShardStore) -> None:
    order = store.epoch_order(3, 2)
    flat = [s for batch in order for s in batch]
    assert len(flat) == len(set(flat))
    assert len(flat) >= len(store.train) - 2
    assert store.epoch_order(3, 2) == order


def test_a_loop_is_cut_before_its_third_copy() -> None:
    assert without_loop(list(range(40))) == 40
    looped = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 5
    assert without_loop(looped, gram=10) == 24
    assert without_loop([], gram=10) == 0


def test_overlap_means_equal_or_a_shared_run_of_words() -> None:
    held_out = ["Write a poem about the quiet sea at night for my old friend"]
    assert overlaps("write a POEM about the quiet sea at night, for my old friend!", held_out)
    assert overlaps("Now: a poem about the quiet sea at night for all", held_out)
    assert not overlaps("Write a poem about the loud sea", held_out)
