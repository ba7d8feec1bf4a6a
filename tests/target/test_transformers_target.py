"""The adapter: any causal model that transformers loads, with rollback for every kind of state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from k3dspark.errors import BadInput, EngineFault
from k3dspark.target.loading import open_target
from k3dspark.target.protocol import RaggedRows
from k3dspark.target.rollback import Rollback
from k3dspark.target.transformers_target import TransformersTarget
from target.tiny import GEOMETRY, LAYERS, VOCABULARY, llama, make_model, random_parts, reference, run, save, tokens

TAPS = (0, 1)
LENGTH = 48
LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
KINDS: dict[str, tuple[transformers.PreTrainedConfig, Rollback]] = {
    "attention": (llama(), Rollback.CROP),
    "sliding window": (
        transformers.MistralConfig(**{**GEOMETRY, "sliding_window": 7}),
        Rollback.CROP,
    ),
    "convolution and attention": (
        transformers.Lfm2Config(**GEOMETRY, layer_types=["conv", "full_attention", "conv"]),
        Rollback.CROP,
    ),
    "delta rule and attention": (
        transformers.Qwen3NextConfig(**GEOMETRY, **LINEAR_ATTENTION),
        Rollback.REPLAY,
    ),
    "mamba": (
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=LAYERS, state_size=4),
        Rollback.SNAPSHOT,
    ),
    "a state of its own": (
        transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=LAYERS),
        Rollback.RECOMPUTE,
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, TransformersTarget, Rollback]:
    config, rollback = request.param
    model = make_model(config)
    directory = save(model, tmp_path_factory.mktemp("model"))
    target = open_target(directory, "float32", tap_layer_ids=TAPS, backend="transformers")
    assert isinstance(target, TransformersTarget)
    return model, target, rollback


@pytest.fixture
def target(tmp_path: Path) -> TransformersTarget:
    opened = open_target(save(make_model(llama()), tmp_path), "float32", tap_layer_ids=TAPS, backend="transformers")
    assert isinstance(opened, TransformersTarget)
    return opened


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 1e-4 * right.abs().max()) if right.numel() else left.shape == right.shape


@pytest.mark.parametrize("seed", [0, 1])
def test_ragged_rows_with_rollback_compute_what_one_forward_does(
    opened: tuple[transformers.PreTrainedModel, TransformersTarget, Rollback], seed: int
) -> None:
    model, target, rollback = opened
    assert target.rollback is rollback
    generator = torch.Generator().manual_seed(seed)
    ids, other_ids = tokens(LENGTH, seed=1), tokens(3 * LENGTH, seed=2)
    logits, taps = reference(model, ids, TAPS)
    sequence, other = target.open(), target.open()
    position = 0
    for _, count in random_parts(LENGTH, 9, seed):
        rejected, beside = torch.randint(0, 4, (2,), generator=generator).tolist()
        mine = torch.cat([ids[position : position + count], tokens(rejected, seed=position)])
        theirs = other_ids[position : position + beside]
        output = target.forward(RaggedRows((other, sequence), (beside, len(mine)), torch.cat([theirs, mine])))
        target.commit(sequence, count)
        target.commit(other, beside)
        assert target.length(sequence) == position + count
        assert close(output.logits[beside : beside + count], logits[position : position + count])
        assert close(output.taps[beside : beside + count], taps[position : position + count])
        position += count


def test_the_adapter_and_the_lean_forward_agree(tmp_path: Path) -> None:
    directory = save(make_model(llama()), tmp_path)
    lean = open_target(directory, "float32", tap_layer_ids=TAPS)
    adapter = open_target(directory, "float32", tap_layer_ids=TAPS, backend="transformers")
    assert (lean.vocab_size, lean.hidden_size, lean.max_positions) == (
        adapter.vocab_size,
        adapter.hidden_size,
        adapter.max_positions,
    )
    one, two = (run(target, target.open(), tokens(40)) for target in (lean, adapter))
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.taps, two.taps, rtol=1e-4, atol=1e-4)
    ids, hidden = tokens(5), torch.randn(5, 48)
    assert torch.equal(lean.embed(ids), adapter.embed(ids))
    torch.testing.assert_close(lean.unembed(hidden), adapter.unembed(hidden), rtol=1e-4, atol=1e-4)


def test_a_long_prompt_is_run_in_pieces(target: TransformersTarget) -> None:
    ids = tokens(600)
    wanted = torch.tensor([599, 3])
    output = target.forward(RaggedRows((target.open(),), (600,), ids, wanted))
    logits, taps = reference(target.model, ids, TAPS)
    assert close(output.logits, logits[wanted])
    assert close(output.taps, taps)


def test_wanted_rows_come_back_in_the_wanted_order(target: TransformersTarget) -> None:
    ids, wanted = tokens(9), torch.tensor([7, 0, 5])
    logits, _ = reference(target.model, ids[4:], TAPS)
    output = target.forward(RaggedRows((target.open(), target.open()), (4, 5), ids, wanted))
    assert close(output.logits[[0, 2]], logits[[3, 1]])


def test_the_last_layer_cannot_be_tapped_through_transformers(tmp_path: Path) -> None:
    directory = save(make_model(llama()), tmp_path)
    with pytest.raises(BadInput, match=r"tap layers \[0, 2\]"):
        open_target(directory, "float32", tap_layer_ids=(0, 2), backend="transformers")


def test_misuse_is_refused(target: TransformersTarget) -> None:
    sequence = target.open()
    with pytest.raises(BadInput, match="token id 61"):
        run(target, sequence, torch.tensor([VOCABULARY]))
    with pytest.raises(BadInput, match="do not fit"):
        run(target, sequence, tokens(target.max_positions + 1))
    target.forward(RaggedRows((sequence,), (2,), tokens(2)))
    with pytest.raises(EngineFault, match="uncommitted"):
        run(target, sequence, tokens(1))
    with pytest.raises(EngineFault, match="cannot commit 3"):
        target.commit(sequence, 3)
    target.close(sequence)
    with pytest.raises(EngineFault, match="not open"):
        target.length(sequence)


def test_logits_that_are_not_finite_are_an_engine_fault(target: TransformersTarget) -> None:
    with torch.no_grad():
        target.model.model.norm.weight[0] = float("inf")
    with pytest.raises(EngineFault, match="not finite"):
        run(target, target.open(), tokens(3))
