"""Bitwise: how tokens are split into calls, their companions and the sequence's growth change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3dspark.errors import BadInput
from k3dspark.model import native
from k3dspark.model.packed import PackedLinear
from k3dspark.target import attention
from k3dspark.target.attention import MASKED, attend, chunk_mask
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.protocol import RaggedRows, TargetOutput
from k3dspark.target.weights import LlamaWeights, load_llama
from target.tiny import llama, make_model, qwen3, random_parts, run, save, tokens

LENGTH = 600  # past two borders of 256


CONFIGS = {"llama": llama(), "qwen3": qwen3(), "one key-value head": llama(num_key_value_heads=1)}
# (config, dtype, rows of a tile, keys of a chunk, products: by our kernel if it can be had, oneDNN's, or plain ones)
CASES = [
    ("llama", torch.float32, 8, 256, "kernel"),
    ("qwen3", torch.float32, 8, 256, "kernel"),
    ("one key-value head", torch.float32, 8, 256, "kernel"),
    ("llama", torch.bfloat16, 8, 256, "kernel"),
    ("qwen3", torch.int8, 8, 256, "kernel"),
    ("llama", torch.float32, 8, 256, "oneDNN"),
    ("llama", torch.bfloat16, 8, 256, "oneDNN"),
    ("llama", torch.float32, 8, 256, "plain"),
    ("qwen3", torch.float32, 8, 16, "oneDNN"),
    ("llama", torch.float32, 4, 64, "kernel"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaTarget:
    name, dtype, tile_rows, chunk, products = request.param
    int8 = dtype == torch.int8
    directory = save(make_model(CONFIGS[name]), tmp_path_factory.mktemp("model"))
    weights = load_llama(directory, torch.float32 if int8 else dtype)
    with pytest.MonkeyPatch.context() as patch:
        if products != "kernel":
            patch.setattr(native, "available", lambda: False)
        return LlamaTarget(
            weights, (0, 2), tile_rows=tile_rows, chunk=chunk, prepack=products != "plain", int8=int8
        )


@pytest.fixture(scope="module")
def whole(target: LlamaTarget) -> TargetOutput:
    return run(target, target.open(), tokens(LENGTH))


def same_bits(output: TargetOutput, whole: TargetOutput, first: int, count: int, offset: int = 0) -> bool:
    mine, theirs = slice(offset, offset + count), slice(first, first + count)
    return torch.equal(output.logits[mine], whole.logits[theirs]) and torch.equal(output.taps[mine], whole.taps[theirs])


@pytest.mark.parametrize(("largest", "seed"), [(1, 0), (3, 1), (8, 2), (8, 3), (40, 4), (300, 5)])
def test_splits_do_not_change_a_bit(target: LlamaTarget, whole: TargetOutput, largest: int, seed: int) -> None:
    sequence, ids = target.open(), tokens(LENGTH)
    start = 0
    if largest <= 8:  # short calls, where they cross a border of 256
        start = 240
        run(target, sequence, ids[:start])
    for first, count in random_parts(300 - start if largest <= 8 else LENGTH, largest, seed):
        output = run(target, sequence, ids[start + first : start + first + count])
        assert same_bits(output, whole, start + first, count), (start + first, count)
    target.close(sequence)


@pytest.mark.parametrize("seed", range(3))
def test_companions_do_not_change_a_bit(target: LlamaTarget, whole: TargetOutput, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = tokens(LENGTH)
    sequence, companions = target.open(), [target.open() for _ in range(3)]
    run(target, sequence, ids[:250])
    run(target, companions[1], tokens(255, seed=7))  # crosses a border of 256 beside us
    for first, count in random_parts(40, 9, seed):
        lengths = torch.randint(0, 6, (4,), generator=generator).tolist()
        place = int(torch.randint(0, 4, (1,), generator=generator))
        handles = [*companions[:place], sequence, *companions[place:]]
        lengths[place] = count
        rows = tokens(sum(lengths), seed=seed + first)
        offset = sum(lengths[:place])
        rows[offset : offset + count] = ids[250 + first : 250 + first + count]
        output = target.forward(RaggedRows(tuple(handles), tuple(lengths), rows))
        for handle, length in zip(handles, lengths, strict=True):
            target.commit(handle, length if handle == sequence else length // 2)
        assert same_bits(output, whole, 250 + first, count, offset)


@pytest.mark.parametrize("seed", range(3))
def test_rolled_back_rows_leave_no_trace(target: LlamaTarget, whole: TargetOutput, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids, sequence = tokens(LENGTH), target.open()
    run(target, sequence, ids[:245])
    position = 245
    while position < 275:
        good, bad = torch.randint(0, 5, (2,), generator=generator).tolist()
        rows = torch.cat([ids[position : position + good], tokens(bad, seed=position)])
        output = run(target, sequence, rows, keep=good)
        assert target.length(sequence) == position + good
        assert same_bits(output, whole, position, good)
        position += good


def test_reserving_room_does_not_change_a_bit(target: LlamaTarget, whole: TargetOutput) -> None:
    output = run(target, target.open(capacity=LENGTH), tokens(LENGTH))
    assert same_bits(output, whole, 0, LENGTH)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.integers(1, 30), min_size=1, max_size=12), chunk=st.sampled_from([16, 32, 48]))
def test_any_split_over_any_chunk_size_is_bitwise_the_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], chunk: int
) -> None:
    target = LlamaTarget(_small(tmp_path_factory), (1,), chunk=chunk)
    ids = tokens(sum(parts))
    every = run(target, target.open(), ids)
    sequence, first = target.open(), 0
    for count in parts:
        assert same_bits(run(target, sequence, ids[first : first + count]), every, first, count)
        first += count


def _small(factory: pytest.TempPathFactory) -> LlamaWeights:
    directory = Path(factory.getbasetemp()) / "small"
    if not directory.exists():
        save(make_model(llama()), directory)
    return load_llama(directory)


@pytest.mark.parametrize("hidden_chunks", [1, 2, 7])
def test_a_masked_chunk_is_the_identity_of_the_merge(hidden_chunks: int) -> None:
    queries, mask = torch.randn(2, 24, 16), chunk_mask(torch.arange(30, 38), 3, 3, 16)
    keys, values = torch.randn(3, 2, 16, 16), torch.randn(3, 2, 16, 16)
    more = 100 * torch.randn(2, hidden_chunks, 2, 16, 16)
    longer = torch.cat([mask, torch.full((hidden_chunks, 1, 24, 16), MASKED)])
    expected = attend(queries.expand(3, -1, -1, -1), keys, values, mask, 0.25)
    grown = attend(
        queries.expand(3 + hidden_chunks, -1, -1, -1),
        torch.cat([keys, more[0]]),
        torch.cat([values, more[1]]),
        longer,
        0.25,
    )
    assert torch.equal(grown, expected)


@pytest.mark.parametrize("kernel", ["flash", "plain"])
def test_the_merge_of_chunks_is_softmax_attention(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "plain":  # what other devices run
        monkeypatch.setattr(attention, "_FLASH", None)
    queries, keys, values = torch.randn(2, 24, 16), torch.randn(5, 2, 16, 16), torch.randn(5, 2, 16, 16)
    limits = torch.tensor([0, 15, 16, 40, 63, 64, 78, 79])
    merged = attend(queries.expand(5, -1, -1, -1), keys, values, chunk_mask(limits, 3, 5, 16), 0.25)
    flat_keys, flat_values = (t.transpose(0, 1).reshape(2, 80, 16).double() for t in (keys, values))
    scores = queries.double() @ flat_keys.transpose(1, 2) * 0.25
    visible = torch.arange(80)[None] <= limits.repeat_interleave(3)[:, None]
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ flat_values
    torch.testing.assert_close(merged, expected.transpose(0, 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prepack", [True, False])
def test_a_row_of_a_tile_depends_on_nothing_else_in_it(prepack: bool) -> None:
    linear = PackedLinear(torch.randn(192, 576), torch.randn(192), tile_rows=8, prepack=prepack)
    row = torch.randn(576)
    results = []
    for place in range(8):
        tile = 10 * torch.randn(8, 576)
        tile[place] = row
        results.append(linear(tile)[place])
    assert all(torch.equal(result, results[0]) for result in results)


def test_without_fixed_tiles_the_bits_follow_the_shape(tmp_path: Path) -> None:
    """The reason for the tiles; it can only be seen where this CPU's kernels depend on the number of rows."""
    linear = PackedLinear(torch.randn(512, 1536), None, tile_rows=8, prepack=False)
    rows = torch.randn(64, 1536)
    if all(torch.equal(linear(rows[:n]), linear(rows)[:n]) for n in (1, 2, 4, 8)):
        pytest.skip("this CPU's linear kernel gives the same bits for any number of rows")
    weights = load_llama(save(make_model(llama(hidden_size=516, intermediate_size=1536)), tmp_path))
    outputs = {}
    for exact in (True, False):
        target = LlamaTarget(weights, exact=exact, prepack=False)
        every, sequence = run(target, target.open(), tokens(40)), target.open()
        one_by_one = torch.cat([run(target, sequence, tokens(40)[i : i + 1]).logits for i in range(40)])
        outputs[exact] = torch.equal(one_by_one, every.logits)
    assert outputs == {True: True, False: False}


@pytest.mark.parametrize("wrong", [{"tile_rows": 12}, {"tile_rows": 0}, {"chunk": 100}, {"chunk": 0}])
def test_sizes_that_could_not_be_exact_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    weights = load_llama(save(make_model(llama()), tmp_path))
    with pytest.raises(BadInput, match="is not exact"):
        LlamaTarget(weights, **wrong)  # type: ignore[arg-type]
