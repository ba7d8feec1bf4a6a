"""Joining the draft to Kimi K3's cache costs what the engine itself reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.deploy.cache_groups import TargetLayout, cache_groups, joining_cost

K3 = TargetLayout()


def test_kimi_k3_alone_pads_three_layers() -> None:
    groups = cache_groups(K3, 0, 0, 16)
    assert (groups.group_layers, groups.recurrent_groups, groups.padding_layers) == (24, 3, 3)
    assert f"{groups.padding_share:.2%}" == "4.35%"


def test_with_the_draft_it_pads_eighteen() -> None:
    groups = cache_groups(K3, 5, 7, 16)
    assert (groups.group_layers, groups.recurrent_groups, groups.padding_layers) == (29, 3, 18)
    assert f"{groups.padding_share:.2%}" == "26.09%"


def test_a_block_holds_as_many_tokens_as_a_recurrent_state_is_large() -> None:
    assert cache_groups(K3, 5, 7, 16).block_tokens == 384  # vllm-ascend#14765
    assert cache_groups(K3, 5, 7, 4).block_tokens == 1536  # vLLM's recipe of Kimi K3


def test_kinds_of_nearly_equal_number_take_the_larger_one_as_group() -> None:
    layout = TargetLayout(attention_layers=12, recurrent_layers=13)
    groups = cache_groups(layout, 0, 0, 1)
    assert (groups.group_layers, groups.padding_layers) == (13, 1)


def test_the_drafts_own_rows_are_5760_bytes_a_token_and_a_million_tokens_6_gigabytes() -> None:
    cost = joining_cost(K3, 5, 7, 16, 1_048_576)
    assert cost.rows == 5760 * 1_048_576
    assert f"{cost.rows / 1e9:.2f}" == "6.04"
    assert cost.padding > 0


@given(tokens=st.integers(1, 2**20), parallel=st.sampled_from([1, 2, 4, 8, 16, 32]), draft=st.integers(0, 8))
def test_what_is_reserved_is_never_less_than_what_is_stored(tokens: int, parallel: int, draft: int) -> None:
    groups = cache_groups(K3, draft, 7, parallel)
    stored = (24 + draft) * K3.row_bytes * tokens + 69 * groups.state_blocks * K3.state_bytes(parallel)
    assert groups.request_bytes(tokens) >= stored


@pytest.mark.parametrize("parallel", [8, 16])
def test_longer_sequences_reserve_more(parallel: int) -> None:
    groups = cache_groups(K3, 5, 7, parallel)
    sizes = [groups.request_bytes(2**n) for n in range(8, 21)]
    assert sizes == sorted(sizes)
