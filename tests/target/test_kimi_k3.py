"""Kimi K3 as a target: taps of both streams, rollback after anything, a rotated basis."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import PREFIX
from k3dspark.errors import BadInput, EngineFault
from k3dspark.model.ops import rms_norm
from k3dspark.model.rotation import rotation_between, undo_rotation
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_kda import DeltaAttention, DeltaState
from k3dspark.target.kimi_k3_model import KimiK3Model
from k3dspark.target.protocol import RaggedRows
from target.small_k3 import LAYERS, VOCABULARY, ids, random_tensors, rotated, small_model, small_shape, small_target
from target.tiny import run
from toy_models import toy_draft

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STREAMS: tuple[Literal["prefix", "attn_res"], ...] = ("prefix", "attn_res")


# -- taps -------------------------------------------------------------------------------------------------------------


def mix(values: list[Tensor], tensors: dict[str, Tensor], name: str) -> Tensor:
    """One mixture of spec §H.3."""
    direction = tensors[f"{name}_norm.weight"].double() * tensors[f"{name}_proj.weight"][0].double()
    scores = [(v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * direction).sum(-1) for v in values]
    shares = torch.stack(scores).softmax(0)
    return sum((s[:, None] * v for s, v in zip(shares, values, strict=True)), torch.zeros_like(values[0]))


def by_hand(model: KimiK3Model, tensors: dict[str, Tensor], tokens: Tensor) -> dict[str, list[Tensor]]:
    """Both streams after every layer, and the final hidden state, in the steps of spec §H.3."""
    shape, root = model.shape, f"{PREFIX}model."
    s: Tensor | None = model.embed_weight[tokens]
    banks: list[Tensor] = []
    prefix, read = [], []
    for i, layer in enumerate(model.layers):
        assert s is not None
        x = mix([*banks, s], tensors, f"{root}layers.{i}.self_attention_res") if banks else s
        read.append(x)
        if i % 3 == 0:
            banks.append(s)
            s = None
        z = rms_norm(x, layer.input_norm, shape.eps)
        if isinstance(layer.attention, DeltaAttention):
            state = DeltaState.empty(shape, (1,), torch.float64, torch.device("cpu"))
            a, _ = layer.attention(z, state, torch.arange(len(tokens)), (1, len(tokens)))
        else:
            a, _ = layer.attention(z, [[]], [len(tokens)])
        s = a if s is None else s + a
        x = mix([*banks, s], tensors, f"{root}layers.{i}.mlp_res")
        s = s + layer.mlp(rms_norm(x, layer.post_norm, shape.eps))
        prefix.append(s)
    assert s is not None
    output = mix([*banks, s], tensors, f"{root}output_attn_res")
    return {"prefix": prefix, "attn_res": [*read[1:], output], "hidden": [rms_norm(output, model.norm, shape.eps)]}


def test_every_layer_is_tapped_where_the_stream_says_and_the_residuals_follow_their_steps() -> None:
    tensors = random_tensors(small_shape())
    model, tokens = small_model(tensors), ids(11)
    with torch.no_grad():
        expected = by_hand(model, tensors, tokens)
    for stream in STREAMS:
        target = KimiK3Target(model, range(LAYERS), stream)
        output = run(target, target.open(), tokens)
        torch.testing.assert_close(output.taps, torch.cat(expected[stream], -1), **EXACT)
        logits = model.logits(expected["hidden"][0]).float()
        torch.testing.assert_close(output.logits, logits, rtol=1e-6, atol=1e-6)
    apart = [(p - a).abs().max() for p, a in zip(expected["prefix"], expected["attn_res"], strict=True)]
    assert min(apart) > 0.01, "no layer would notice the wrong stream"


def test_a_tap_after_the_last_layer_of_a_block_holds_that_block_alone() -> None:
    tensors = random_tensors(small_shape())
    name = f"{PREFIX}model.embed_tokens.weight"
    target = small_target((2, 5), tensors=tensors)
    usual = run(target, target.open(), ids(6)).taps
    # Every layer after 2 is silenced: a tap of block 3–5 that held anything from before would not be zero.
    for layer in (3, 4, 5):
        for matrix in ("self_attn.o_proj", "block_sparse_moe.routed_expert_up_proj"):
            tensors[f"{PREFIX}model.layers.{layer}.{matrix}.weight"].zero_()
        tensors[f"{PREFIX}model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight"].zero_()
    silenced = small_target((2, 5), tensors=tensors)
    taps = run(silenced, silenced.open(), ids(6)).taps
    width = tensors[name].shape[1]
    assert torch.equal(taps[:, :width], usual[:, :width])
    assert not taps[:, width:].any()
    assert usual[:, width:].abs().min(-1).values.max() > 0


# -- rollback ---------------------------------------------------------------------------------------------------------

ROUNDS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def shared() -> KimiK3Target:
    return small_target()


@settings(max_examples=25)
@given(ROUNDS, st.integers(0, 3))
@example([(8, 0, 2), (8, 8, 0), (1, 1, 1), (8, 3, 3), (9, 1, 0), (8, 2, 2)], 0)
def test_rollback_after_any_acceptance_is_recomputation_from_scratch(
    shared: KimiK3Target, rounds: list[tuple[int, int, int]], seed: int
) -> None:
    text, noise = ids(80, seed=seed), ids(80, seed=seed + 10)
    beside = ids(40, seed=20)
    whole = run(shared, shared.open(), text)
    other_whole = run(shared, shared.open(), beside)
    sequence, other = shared.open(), shared.open()
    position = place = 0
    for count, kept, company in rounds:
        kept = min(kept, count)
        mine = torch.cat([text[position : position + kept], noise[: count - kept]])
        theirs = beside[place : place + company]
        output = shared.forward(RaggedRows((other, sequence), (company, count), torch.cat([theirs, mine])))
        torch.testing.assert_close(
            output.taps[company : company + kept], whole.taps[position : position + kept], **EXACT
        )
        torch.testing.assert_close(output.taps[:company], other_whole.taps[place : place + company], **EXACT)
        shared.commit(sequence, kept)
        shared.commit(other, company)
        position, place = position + kept, place + company
        assert (shared.length(sequence), shared.length(other)) == (position, place)
    last = run(shared, sequence, text[position : position + 3])
    torch.testing.assert_close(last.taps, whole.taps[position : position + 3], **EXACT)
    torch.testing.assert_close(last.logits, whole.logits[position : position + 3], rtol=1e-6, atol=1e-6)
    for handle in (sequence, other):
        shared.close(handle)


@pytest.mark.parametrize("part", ["memory", "inputs"])
def test_a_state_that_kept_a_rejected_row_would_be_seen(shared: KimiK3Target, part: str) -> None:
    text = ids(20)
    expected = run(shared, shared.open(), text).taps[9:12]
    sequence = shared.open()
    run(shared, sequence, text[:8])
    shared.forward(RaggedRows((sequence,), (3,), torch.cat([text[8:9], ids(2, seed=5)])))
    state = shared._sequences[sequence]
    assert state.pending is not None
    assert state.pending.delta is not None
    spoilt = state.pending.delta.after(state.delta, 3)
    shared.commit(sequence, 1)
    changed = {"memory": state.delta.memory, "inputs": state.delta.inputs, part: getattr(spoilt, part)}
    right, state.delta = state.delta, DeltaState(**changed)
    wrong = shared.forward(RaggedRows((sequence,), (3,), text[9:12])).taps
    shared.commit(sequence, 0)
    state.delta = right
    torch.testing.assert_close(run(shared, sequence, text[9:12]).taps, expected, **EXACT)
    assert (wrong - expected).abs().max() > 1e-3


def test_logits_come_for_the_rows_that_are_wanted_in_their_order(shared: KimiK3Target) -> None:
    tokens, wanted = ids(9), torch.tensor([7, 0, 5])
    everything = shared.forward(RaggedRows((shared.open(), shared.open()), (4, 5), tokens))
    some = shared.forward(RaggedRows((shared.open(), shared.open()), (4, 5), tokens, wanted))
    torch.testing.assert_close(some.logits, everything.logits[wanted], rtol=1e-6, atol=1e-6)
    assert some.logits.dtype == torch.float32


def test_misuse_is_refused(shared: KimiK3Target) -> None:
    sequence = shared.open()
    with pytest.raises(BadInput, match=f"token id {VOCABULARY}"):
        run(shared, sequence, torch.tensor([VOCABULARY]))
    with pytest.raises(BadInput, match="do not fit"):
        run(shared, sequence, ids(257))
    shared.forward(RaggedRows((sequence,), (2,), ids(2)))
    with pytest.raises(EngineFault, match="uncommitted"):
        run(shared, sequence, ids(1))
    with pytest.raises(EngineFault, match="cannot commit 3"):
        shared.commit(sequence, 3)
    shared.close(sequence)
    with pytest.raises(EngineFault, match="not open"):
        shared.length(sequence)
    with pytest.raises(BadInput, match="tap layers"):
        KimiK3Target(shared.model, (LAYERS,))


# -- a rotated basis --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fc_norm", [False, True])
def test_in_a_rotated_target_a_draft_with_its_own_embedding_and_head_drafts_as_before(
    stream: Literal["prefix", "attn_res"], fc_norm: bool
) -> None:
    shape = small_shape()
    tensors = random_tensors(shape)
    random = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = torch.linalg.qr(random).Q
    plain = small_target(stream=stream, tensors=tensors)
    turned = small_target(stream=stream, tensors=rotated(tensors, rotation))
    tokens = ids(30)
    usual, output = (run(target, target.open(), tokens) for target in (plain, turned))
    torch.testing.assert_close(output.logits, usual.logits, rtol=1e-6, atol=1e-6)
    assert (output.taps - usual.taps).abs().max() > 0.1

    draft = toy_draft(plain, fc_norm=fc_norm)
    if fc_norm:
        for norm in draft.fc_norm:
            norm.weight.uniform_(0.5, 1.5)
    expected = draft.context_rows(usual.taps, torch.arange(30))
    found = rotation_between(plain.embed_weight, turned.embed_weight)
    assert found is not None
    torch.testing.assert_close(found, rotation, rtol=1e-6, atol=1e-6)
    undo_rotation(draft, found)
    torch.testing.assert_close(draft.context_rows(output.taps, torch.arange(30)), expected, rtol=1e-6, atol=1e-6)


def test_equal_or_unrelated_embeddings_are_no_rotation() -> None:
    one, other = (torch.nn.functional.normalize(torch.randn(200, 16)) for _ in range(2))
    assert rotation_between(one, one.clone()) is None
    assert rotation_between(one, other) is None
    assert rotation_between(one, 2 * one) is None
    assert rotation_between(one[:10], one[:10] @ torch.linalg.qr(torch.randn(16, 16)).Q) is None
