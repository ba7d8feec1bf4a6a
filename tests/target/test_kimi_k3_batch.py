"""Many prompts of a Kimi K3 in step: the rows are those of the target that decodes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from k3dspark.target.kimi_k3_batch import KimiK3BatchForward
from k3dspark.target.protocol import RaggedRows
from target.small_k3 import ids, small_model, small_target

TAPS = (0, 2, 5)
LENGTHS = (5, 1, 9, 3)
STREAMS: tuple[Literal["prefix", "attn_res"], ...] = ("prefix", "attn_res")


def one_by_one(prompts: list[list[int]], more: Tensor, stream: Literal["prefix", "attn_res"]) -> list[Tensor]:
    """Taps [T + steps, N·d] of every prompt followed by its column of `more` [steps, B]."""
    target = small_target(TAPS, stream)
    taps = []
    for row, prompt in enumerate(prompts):
        handle = target.open()
        whole = torch.tensor([*prompt, *more[:, row].tolist()])
        taps.append(target.forward(RaggedRows((handle,), (len(whole),), whole)).taps)
    return taps


@pytest.mark.parametrize("stream", STREAMS)
def test_prompts_in_step_give_the_taps_of_each_alone(stream: Literal["prefix", "attn_res"]) -> None:
    prompts = [ids(count, seed=count).tolist() for count in LENGTHS]
    more = torch.stack([ids(len(prompts), seed=20 + step) for step in range(4)])
    expected = one_by_one(prompts, more, stream)

    forward = KimiK3BatchForward(small_model(), TAPS, stream)
    filled = forward.prefill(prompts, 4, record=True)
    state, steps = filled.state, []
    for tokens in more:
        _, taps = forward.step(tokens, state)
        steps.append(taps)
    for row, wanted in enumerate(expected):
        count = LENGTHS[row]
        recorded = filled.rows[row][1]
        torch.testing.assert_close(recorded.double(), wanted[:count], atol=1e-2, rtol=2e-3)  # fp16
        torch.testing.assert_close(torch.stack([s[row] for s in steps]), wanted[count:], atol=1e-9, rtol=1e-9)


def test_a_sequence_chosen_twice_goes_on_as_two() -> None:
    forward = KimiK3BatchForward(small_model(), TAPS)
    prompts = [ids(4, seed=1).tolist(), ids(6, seed=2).tolist()]
    state = forward.prefill(prompts, 2, record=False).state.select(torch.tensor([1, 0, 1]))
    first, _ = forward.step(torch.tensor([3, 4, 5]), state)
    _, second = forward.step(torch.tensor([6, 6, 6]), state)
    (expected,) = one_by_one([prompts[1]], torch.tensor([[5], [6]]), "prefix")
    torch.testing.assert_close(second[2], expected[-1], atol=1e-9, rtol=1e-9)
    assert float((second[0] - second[2]).abs().max()) > 1e-3
    assert [cache.length for cache in state.latent] == [8, 6, 8]
    assert first.shape == (3, forward.hidden_size)
