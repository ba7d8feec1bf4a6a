"""The context cache: growth by blocks, truncation, and its size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.errors import BadInput
from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig


def rows_of(cache: LatentCache, layer: int) -> torch.Tensor:
    chunks = cache.chunks(layer)
    return torch.cat(chunks) if chunks else torch.empty(0, cache.row_width)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=12))
def test_appends_and_truncations_leave_what_a_plain_list_would(history: list[tuple[int, int]]) -> None:
    cache = LatentCache(2, 3, torch.float32, block_tokens=4)
    expected = torch.empty(2, 0, 3)
    counter = 0
    for added, dropped in history:
        rows = torch.arange(counter, counter + 6 * added).float().view(2, added, 3)
        counter += 6 * added
        cache.append(rows)
        expected = torch.cat([expected, rows], 1)
        keep = max(cache.length - dropped, 0)
        cache.truncate(keep)
        expected = expected[:, :keep]
        assert cache.length == expected.shape[1]
        for layer in range(2):
            assert torch.equal(rows_of(cache, layer), expected[layer])


def test_growth_never_moves_rows_already_written() -> None:
    cache = LatentCache(1, 2, torch.float32, block_tokens=4)
    cache.append(torch.ones(1, 4, 2))
    before = cache.chunks(0)[0].data_ptr()
    cache.append(torch.ones(1, 100, 2))
    assert cache.chunks(0)[0].data_ptr() == before


def test_a_token_of_the_published_draft_takes_5760_bytes() -> None:
    config = K3DSparkConfig.published()
    assert LatentCache(config.num_hidden_layers, config.row_width).bytes_per_token == 5760


def test_truncation_frees_whole_blocks() -> None:
    cache = LatentCache(1, 2, torch.float32, block_tokens=4)
    cache.append(torch.ones(1, 12, 2))
    cache.truncate(5)
    assert [len(c) for c in cache.chunks(0)] == [4, 1]


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 3, 3), (2, 3)])
def test_rows_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="context rows have shape"):
        LatentCache(2, 2, torch.float32).append(torch.zeros(shape))


@pytest.mark.parametrize("length", [-1, 4])
def test_only_rows_that_exist_can_be_kept(length: int) -> None:
    cache = LatentCache(1, 2, torch.float32)
    cache.append(torch.zeros(1, 3, 2))
    with pytest.raises(BadInput, match="cannot truncate"):
        cache.truncate(length)
