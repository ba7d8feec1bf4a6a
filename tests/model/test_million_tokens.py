"""A context of 1,048,576 tokens: memory by the formula, bounded workspace, exact positions, the same attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3dspark.model.allocation import LargestAllocation
from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.ops import attend_latent
from k3dspark.model.rope import Rope

MILLION = 1 << 20
LIMIT = 256 << 20
PUBLISHED = K3DSparkConfig.published()


@pytest.fixture(scope="module")
def full_size() -> K3DSparkModel:
    """The published draft without memory: every shape and every operator, no numbers."""
    with torch.device("meta"):
        head = torch.empty(PUBLISHED.vocab_size, PUBLISHED.hidden_size, dtype=torch.bfloat16)
        return K3DSparkModel(PUBLISHED, head).to(torch.bfloat16).requires_grad_(False)


def fill(cache: LatentCache, rows: Tensor, length: int) -> LatentCache:
    while cache.length < length:
        cache.append(rows[:, : length - cache.length])
    return cache


def test_a_block_after_a_million_rows_needs_no_large_workspace(full_size: K3DSparkModel) -> None:
    cache = full_size.new_cache(1 << 14)  # four times the usual block, to be quick
    fill(cache, torch.empty(5, 1 << 16, 576, dtype=torch.bfloat16, device="meta"), MILLION)
    with LargestAllocation() as largest:
        full_size.propose([cache], torch.tensor([1], device="meta"), torch.tensor([MILLION - 1], device="meta"))
    assert 0 < largest.bytes <= LIMIT


def test_a_chunk_of_a_prompt_needs_no_large_workspace(full_size: K3DSparkModel) -> None:
    taps = torch.empty(256, full_size.config.context_width, dtype=torch.bfloat16, device="meta")
    with LargestAllocation() as largest:
        full_size.context_rows(taps, torch.arange(256, device="meta"))
    assert 0 < largest.bytes <= LIMIT


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, MILLION - 1, MILLION])
def test_the_cache_takes_5760_bytes_a_token_and_at_most_one_block_more(length: int) -> None:
    cache = LatentCache(5, 576, torch.bfloat16, "meta")
    fill(cache, torch.empty(5, 1 << 16, 576, dtype=torch.bfloat16, device="meta"), length)
    assert 0 <= cache.allocated_bytes - 5760 * length < 5760 * cache.block_tokens


def test_attention_over_a_million_rows_in_blocks_is_one_softmax() -> None:
    random = torch.Generator().manual_seed(0)
    cache = LatentCache(1, 6, torch.float32)
    for _ in range(MILLION >> 16):
        cache.append(torch.randn(1, 1 << 16, 6, generator=random))
    query, block = torch.randn(3, 6, generator=random), torch.randn(2, 6, generator=random)
    rows = torch.cat([*cache.chunks(0), block]).double()
    expected = (query.double() @ rows.T * 0.7).softmax(-1) @ rows[:, :4]
    assert len(cache.chunks(0)) == 256
    found = attend_latent(query, cache.chunks(0), block, 0.7, 4, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_one_row_among_a_million_is_found_wherever_it_lies() -> None:
    cache = LatentCache(1, 3, torch.float32)
    for _ in range(MILLION >> 16):
        cache.append(torch.zeros(1, 1 << 16, 3))
    query, block = torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3)
    for place in (0, 4095, 4096, 700_001, MILLION - 1):
        chunks = list(cache.chunks(0))
        chunks[place >> 12] = chunks[place >> 12].clone()
        chunks[place >> 12][place & 4095] = torch.tensor([5.0, -3.0, 100.0])
        found = attend_latent(query, chunks, block, 1.0, 2, None)
        torch.testing.assert_close(found, torch.tensor([[5.0, -3.0]]))


def test_every_position_of_the_window_is_exact_and_its_angles_are_near_those_of_fp64() -> None:
    """fp32 holds integers up to 2^24; an angle m·ω then carries the rounding of ω and of the product, 2^-24 each."""
    rope = Rope.from_parameters(64, PUBLISHED.rope_parameters)
    frequencies = rope.frequencies
    for low in range(0, MILLION, 1 << 18):
        positions = torch.arange(low, low + (1 << 18))
        assert torch.equal(positions.float().long(), positions)
        sample = torch.cat([positions[:64], positions[::257], positions[-64:]])
        exact = sample.double()[:, None] * frequencies
        allowed = exact * 2.0**-23 + 2e-7  # and what cos and sin add
        cos, sin = rope.angles(sample)
        assert bool(((cos.double() - exact.cos()).abs() <= allowed).all())
        assert bool(((sin.double() - exact.sin()).abs() <= allowed).all())


def test_fp64_angles_at_the_last_position_are_exact() -> None:
    rope = Rope.from_parameters(64, PUBLISHED.rope_parameters)
    cos, _ = rope.angles(torch.tensor([MILLION - 1]), torch.float64)
    assert torch.equal(cos[0], (rope.frequencies * (MILLION - 1)).cos())


def test_the_last_positions_of_the_window_are_told_apart() -> None:
    rope = Rope.from_parameters(64, PUBLISHED.rope_parameters)
    cos, sin = rope.angles(torch.arange(MILLION - 9, MILLION))
    turn = torch.cat([cos, sin], -1)
    assert float(torch.cdist(turn, turn).fill_diagonal_(9).min()) > 0.1


def test_a_block_at_the_end_of_the_window_stays_inside_it(full_size: K3DSparkModel) -> None:
    positions = full_size._block_positions(torch.tensor([MILLION - 3]))
    assert positions.tolist() == [[MILLION - 3, MILLION - 2] + [MILLION - 1] * 5]
