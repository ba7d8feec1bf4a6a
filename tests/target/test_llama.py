"""The lean forward computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from k3dspark.errors import BadInput, EngineFault
from k3dspark.model.packed import can_widen
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.loading import open_target
from k3dspark.target.protocol import RaggedRows
from k3dspark.target.weights import load_llama
from target.tiny import POSITIONS, VOCABULARY, llama, make_model, qwen2, qwen3, reference, run, save, tokens

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, biased attention": llama(attention_bias=True),
    "llama, one key-value head": llama(num_key_value_heads=1),
    "llama, as many key-value heads": llama(num_key_value_heads=6),
    "llama 3.1 rope": llama(rope_parameters=LLAMA3_ROPE),
    "linear rope": llama(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    "qwen2": qwen2(),
    "qwen3": qwen3(),
    "qwen3, tied": qwen3(tie_word_embeddings=True),
}


@pytest.fixture
def target(tmp_path: Path) -> LlamaTarget:
    opened = open_target(save(make_model(llama()), tmp_path), "float32", tap_layer_ids=(0, 2))
    assert isinstance(opened, LlamaTarget)
    return opened


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("exact", [True, False])
def test_lean_logits_and_taps_are_those_of_transformers(
    config: transformers.PreTrainedConfig, exact: bool, tmp_path: Path
) -> None:
    model = make_model(config)
    target = open_target(save(model, tmp_path), "float32", tap_layer_ids=(0, 1), exact=exact, backend="lean")
    ids = tokens(300)
    logits, taps = reference(model, ids, (0, 1))
    output = run(target, target.open(), ids)
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.taps, taps, rtol=1e-4, atol=1e-4)


def test_sharded_weights_are_read_whole(tmp_path: Path) -> None:
    model = make_model(llama())
    save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    target = open_target(tmp_path, "float32")
    logits, _ = reference(model, tokens(20), (0,))
    torch.testing.assert_close(run(target, target.open(), tokens(20)).logits, logits, rtol=1e-4, atol=1e-4)


def test_the_plain_linear_and_the_prepacked_one_agree(tmp_path: Path) -> None:
    weights = load_llama(save(make_model(llama()), tmp_path))
    outputs = []
    for prepack in (True, False):
        target = LlamaTarget(weights, prepack=prepack)
        outputs.append(run(target, target.open(), tokens(30)).logits)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    directory = save(make_model(llama(initializer_range=0.1)), tmp_path)
    outputs = []
    for dtype in ("float32", "bfloat16"):
        target = open_target(directory, dtype, tap_layer_ids=(1,))
        outputs.append(run(target, target.open(), tokens(30)))
    widened = can_widen(torch.empty(1, 1, dtype=torch.bfloat16))  # by our kernel, which rounds no activation
    assert outputs[1].taps.dtype == (torch.float32 if widened else torch.bfloat16)
    assert outputs[1].logits.dtype == torch.float32
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=0.1, atol=0.1)


def test_a_tap_of_the_last_layer_comes_before_the_final_norm(target: LlamaTarget) -> None:
    output = run(target, target.open(), tokens(9))
    last = output.taps[:, target.hidden_size :]
    torch.testing.assert_close(target.unembed(target._final_norm(last)), output.logits)


def test_only_the_wanted_rows_have_logits_in_the_wanted_order(target: LlamaTarget) -> None:
    ids = tokens(20)
    every = run(target, target.open(), ids)
    wanted = torch.tensor([19, 0, 7])
    some = target.forward(RaggedRows((target.open(),), (20,), ids, wanted))
    assert torch.equal(some.logits, every.logits[wanted])
    assert torch.equal(some.taps, every.taps)


def test_no_logits_are_computed_when_none_are_wanted(target: LlamaTarget) -> None:
    output = target.forward(RaggedRows((target.open(),), (5,), tokens(5), torch.empty(0, dtype=torch.long)))
    assert output.logits.shape == (0, VOCABULARY)
    assert output.taps.shape == (5, 96)


def test_embed_and_unembed_use_the_models_own_matrices(tmp_path: Path) -> None:
    model = make_model(llama())
    target = open_target(save(model, tmp_path), "float32")
    ids, hidden = tokens(6).view(2, 3), torch.randn(2, 3, 48)
    assert torch.equal(target.embed(ids), model.model.embed_tokens(ids))
    torch.testing.assert_close(target.unembed(hidden), model.lm_head(hidden), rtol=1e-4, atol=1e-4)


def test_outputs_can_be_trained_on_and_written_to(target: LlamaTarget) -> None:
    output = run(target, target.open(), tokens(3))
    output.logits[0, 0] = 0.0
    weight = torch.ones(96, requires_grad=True)
    (output.taps @ weight).sum().backward()
    assert weight.grad is not None


def test_the_last_position_is_usable_and_the_next_one_is_refused(target: LlamaTarget) -> None:
    sequence = target.open()
    run(target, sequence, tokens(POSITIONS))
    assert target.length(sequence) == target.max_positions == POSITIONS
    with pytest.raises(BadInput, match="701 tokens do not fit"):
        run(target, sequence, tokens(1))


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused(target: LlamaTarget, wrong: int) -> None:
    with pytest.raises(BadInput, match=f"token id {wrong}"):
        run(target, target.open(), torch.tensor([1, wrong]))


def test_weights_with_nan_are_an_engine_fault(tmp_path: Path) -> None:
    model = make_model(llama())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    target = open_target(save(model, tmp_path), "float32")
    with pytest.raises(EngineFault, match="not finite"):
        run(target, target.open(), tokens(4))


def test_a_forward_over_uncommitted_rows_is_refused(target: LlamaTarget) -> None:
    sequence = target.open()
    target.forward(RaggedRows((sequence,), (3,), tokens(3)))
    with pytest.raises(EngineFault, match="uncommitted"):
        target.forward(RaggedRows((sequence,), (1,), tokens(1)))


def test_no_more_rows_can_be_committed_than_were_run(target: LlamaTarget) -> None:
    sequence = target.open()
    target.forward(RaggedRows((sequence,), (3,), tokens(3)))
    with pytest.raises(EngineFault, match="cannot commit 4"):
        target.commit(sequence, 4)


def test_a_closed_sequence_is_gone(target: LlamaTarget) -> None:
    sequence = target.open()
    target.close(sequence)
    with pytest.raises(EngineFault, match="not open"):
        target.length(sequence)
