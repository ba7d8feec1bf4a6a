"""Regenerated answers: what is recorded is what the target computes, however prompts were grouped."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from k3dspark.target.batch import BatchForward
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.pipeline import default_taps
from k3dspark.training.prompts import passages, template_prompt
from small_training import regenerator

PROMPTS = ["What is a tree?", "Why do cats purr when they are content?", "Tell me a story about two old ships."]


def conversations(shard: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    offsets = shard["offsets"].tolist()
    return [
        {name: shard[name][start:end] for name in ("ids", "taps", "final", "log_normalizer")}
        for start, end in pairwise(offsets)
    ]


def test_a_prompt_is_answered_at_different_temperatures(weights: LlamaWeights) -> None:
    shard = regenerator(weights, seed=5, answers=2)._shard(PROMPTS)
    temperatures = shard["temperature"].view(-1, 2)
    assert (temperatures[:, 0] != temperatures[:, 1]).all()
    starts = shard["answer_start"].view(-1, 2)
    assert torch.equal(starts[:, 0], starts[:, 1])
    whole = conversations(shard)
    for index in range(len(PROMPTS)):
        first, second, length = whole[2 * index], whole[2 * index + 1], int(starts[index, 0])
        assert torch.equal(first["ids"][:length], second["ids"][:length])
        assert torch.equal(first["taps"][:length], second["taps"][:length])


@pytest.mark.parametrize("answers", [1, 3])
def test_recorded_rows_are_those_of_one_forward_over_the_whole_conversation(
    weights: LlamaWeights, answers: int
) -> None:
    shard = regenerator(weights, seed=6, answers=answers)._shard(PROMPTS)
    forward = BatchForward(weights, tuple(default_taps(weights.shape.layers)))
    assert len(conversations(shard)) == answers * len(PROMPTS)
    for conversation, start in zip(conversations(shard), shard["answer_start"].tolist(), strict=True):
        ids = conversation["ids"].long()[None]
        hidden, taps = forward.forward(ids, forward.new_state(1, ids.shape[1]))
        # fp16 on disk; the last token was never an input
        torch.testing.assert_close(conversation["taps"][:-1].float(), taps[0, :-1], atol=2e-2, rtol=2e-3)
        torch.testing.assert_close(conversation["final"][:-1].float(), hidden[0, :-1], atol=2e-2, rtol=2e-3)
        expected = (hidden[0] @ weights.head.T).logsumexp(-1)
        torch.testing.assert_close(
            conversation["log_normalizer"][start - 1 : -1], expected[start - 1 : -1], atol=1e-3, rtol=1e-4
        )


def test_greedy_answers_are_the_targets_best_tokens(weights: LlamaWeights) -> None:
    shard = regenerator(weights, seed=7, answers=1, temperatures=(0.0,), temperature_weights=(1.0,))._shard(PROMPTS)
    forward = BatchForward(weights, tuple(default_taps(weights.shape.layers)))
    for conversation, start in zip(conversations(shard), shard["answer_start"].tolist(), strict=True):
        ids = conversation["ids"].long()
        hidden, _ = forward.forward(ids[None], forward.new_state(1, len(ids)))
        best = (hidden[0] @ weights.head.T).argmax(-1)
        assert torch.equal(ids[start:], best[start - 1 : -1])


def test_rewriting_prompts_are_about_whole_sentences_of_earlier_answers() -> None:
    answer = (
        "Sure! Here it is:\n\n1. **Walk** the dog. The weather in the north is cold and often wet. "
        "People wear warm coats there."
    )
    found = passages(answer, random.Random(0))
    assert found
    for text in found:
        assert text in answer
        assert text.endswith(".")
        assert text[0].isupper()
    prompts = {template_prompt(random.Random(seed), found) for seed in range(200)}
    assert any(found[0] in prompt for prompt in prompts)
