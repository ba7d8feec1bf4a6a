"""The adapter: any causal model that transformers loads, with rollback for every kind of state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from k3dspark.errors import BadInput, EngineFault
from k3dspark.target.loading import open_target
from k3dspark.target.protocol import RaggedRows
from k3dspark.target.rollback import save
from k3dspark.target.transformers_target import TransformersTarget
from target.families import FAMILIES, gemma3n
from target.tiny import VOCABULARY, llama, make_model, random_parts, reference, run, tokens
from target.tiny import save as write

TAPS = (0, 1)
LENGTH = 48
# One family for each kind of layer that `rollback` treats in its own way; `decoding/test_families.py` has them all.
KINDS = (
    "Llama",
    "Mistral with a window",
    "DeepSeek-V3.2",  # an index beside keys and values
    "LFM2",  # convolutions and attention
    "Kimi-Linear",  # delta rule and attention
    "Falcon-H1",  # both kinds of state in every layer
    "Jamba",  # one row at a time
    "RecurrentGemma",  # state in the modules, outside any cache
    "MiniMax",  # a cache class of its own
    "RWKV",
)


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, TransformersTarget]:
    config, rollback = FAMILIES[request.param]
    model = make_model(config())
    target = TransformersTarget(model, TAPS)
    assert target.rollback is rollback
    return model, target


@pytest.fixture
def target(tmp_path: Path) -> TransformersTarget:
    opened = open_target(write(make_model(llama()), tmp_path), "float32", tap_layer_ids=TAPS, backend="transformers")
    assert isinstance(opened, TransformersTarget)
    return opened


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 1e-4 * right.abs().max()) if right.numel() else left.shape == right.shape


def test_ragged_rows_with_rollback_compute_what_one_forward_does(
    opened: tuple[transformers.PreTrainedModel, TransformersTarget],
) -> None:
    model, target = opened
    generator = torch.Generator().manual_seed(0)
    ids, other_ids = tokens(LENGTH, seed=1), tokens(3 * LENGTH, seed=2)
    logits, taps = reference(model, ids, TAPS)
    sequence, other = target.open(), target.open()
    position = 0
    for _, count in random_parts(LENGTH, 9, seed=0):
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


def test_a_sequence_returns_to_nothing_and_goes_on(
    opened: tuple[transformers.PreTrainedModel, TransformersTarget],
) -> None:
    model, target = opened
    ids = tokens(9)
    sequence = target.open()
    run(target, sequence, tokens(5, seed=3), keep=0)
    run(target, sequence, torch.cat([ids[:2], tokens(3, seed=4)]), keep=2)  # shorter than a convolution's kernel
    assert close(run(target, sequence, ids[2:]).logits, reference(model, ids, TAPS)[0][2:])


def opened_family(name: str) -> tuple[TransformersTarget, list[int]]:
    """A target, and the rows of every call of its model from now on."""
    target = TransformersTarget(make_model(FAMILIES[name][0]()), TAPS)
    calls: list[int] = []
    target.model.register_forward_pre_hook(lambda _, arguments: calls.append(arguments[0].shape[1]))
    return target, calls


def test_rows_that_a_recurrent_state_lost_ride_along_with_the_next_ones() -> None:
    """A pass of their own would cost a memory-bound target as much as the round itself."""
    target, calls = opened_family("Kimi-Linear")
    ids, sequence = tokens(30), target.open()
    expected, _ = reference(target.model, ids, TAPS)
    calls.clear()
    for first, rows, keep in ((0, 6, 6), (6, 8, 3), (9, 8, 5), (14, 8, 2), (16, 8, 8), (24, 2, 2)):
        output = run(target, sequence, ids[first : first + rows], keep)
        assert close(output.logits, expected[first : first + rows])
    # 3 owed rows ride along, then 3 + 5; 10 are too many and get a pass; after a full acceptance none are owed.
    assert calls == [6, 8, 3 + 8, 8 + 8, 10, 8, 2]


def test_a_model_of_one_row_at_a_time_never_runs_a_row_twice() -> None:
    target, calls = opened_family("Jamba")
    ids, sequence = tokens(30), target.open()
    for first, rows, keep in ((0, 6, 6), (6, 8, 3), (9, 8, 0), (9, 8, 7), (16, 8, 8)):
        run(target, sequence, ids[first : first + rows], keep)
    assert calls == [6, *[1] * 32]


def test_a_long_chunk_of_a_prompt_is_kept_whole_and_still_rolls_back() -> None:
    target, _ = opened_family("Jamba")
    ids, sequence = tokens(60), target.open()
    run(target, sequence, ids[:4])
    target.forward(RaggedRows((sequence,), (40,), ids[4:44]))
    assert len(target._sequences[sequence].saved) == 1
    target.commit(sequence, 5)
    assert close(run(target, sequence, ids[9:]).logits, reference(target.model, ids, TAPS)[0][9:])


@pytest.mark.parametrize("name", ["Kimi-Linear", "Falcon-H1", "Jamba"])
def test_attention_rows_are_not_copied_to_save_a_recurrent_state(name: str) -> None:
    target, _ = opened_family(name)
    sequence = target.open()
    run(target, sequence, tokens(40))
    cache = target._sequences[sequence].cache
    held = {t.data_ptr() for layer in cache.layers for t in (getattr(layer, "keys", None),) if t is not None}
    saved = [value for layer in save(cache) for value in layer.attributes.values()]
    assert held
    assert not [value for value in saved if isinstance(value, torch.Tensor) and value.shape[-2] == 40]
    assert [state for value in saved if isinstance(value, dict) for state in value.values() if torch.is_tensor(state)]


@pytest.mark.parametrize("name", ["Kimi-Linear", "Llama", "Mamba"])
def test_the_kind_of_rollback_is_found_in_16_bits_too(name: str) -> None:
    config, rollback = FAMILIES[name]
    assert TransformersTarget(make_model(config()).bfloat16(), TAPS).rollback is rollback


def test_the_adapter_and_the_lean_forward_agree(tmp_path: Path) -> None:
    directory = write(make_model(llama()), tmp_path)
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
    directory = write(make_model(llama()), tmp_path)
    with pytest.raises(BadInput, match=r"tap layers \[0, 2\]"):
        open_target(directory, "float32", tap_layer_ids=(0, 2), backend="transformers")


def test_a_model_with_several_residual_streams_cannot_be_tapped() -> None:
    with pytest.raises(BadInput, match="one row of 48 numbers per token"):
        TransformersTarget(make_model(gemma3n()), (0,))


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
