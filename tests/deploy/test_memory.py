"""Memory figures follow from config.json and reproduce those of the published deployment guide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.deploy.memory import GB, DraftMemory, Overhead, Wish, plan_memory
from k3dspark.errors import BadInput

CONFIG = published_config()


def test_the_guides_figures_are_reproduced() -> None:
    plan = plan_memory(CONFIG, Wish())
    assert 9.4 <= plan.weights / GB < 9.5
    assert plan.row_bytes == 5760
    assert (plan.smallest_gb, plan.long_gb) == (16, 32)


def test_a_million_tokens_take_6_04_gigabytes_of_cache() -> None:
    cell = next(c for c in plan_memory(CONFIG, Wish()).cells if (c.context, c.sequences) == (1_048_576, 1))
    assert f"{cell.cache / GB:.2f}" == "6.04"


def test_a_cell_is_the_sum_of_its_parts_and_names_the_smallest_device() -> None:
    wish = Wish(devices_gb=(64, 16, 32), utilisation=0.9)
    for cell in plan_memory(CONFIG, wish).cells:
        total = cell.weights + cell.cache + cell.workspace + cell.overhead
        fits = [size for size in (16, 32, 64) if total <= size * GB * 0.9]
        assert cell.device_gb == (fits[0] if fits else None)


def test_splitting_divides_the_large_matrices_and_never_the_cache() -> None:
    whole, split = (plan_memory(CONFIG, Wish(tensor_parallel=n)) for n in (1, 16))
    assert split.weights < 0.35 * whole.weights
    assert [c.cache for c in split.cells] == [c.cache for c in whole.cells]


def test_a_split_that_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(BadInput, match="64 attention heads"):
        plan_memory(CONFIG, Wish(tensor_parallel=3))


def test_an_fp8_cache_halves_the_rows_and_fp8_weights_leave_the_heads_alone() -> None:
    plan = plan_memory(CONFIG, Wish())
    sizes = {(dtype, cache): (weights, row) for dtype, cache, weights, row in plan.dtypes}
    assert sizes["bfloat16", "fp8"][1] == 2880
    layers = 5 * 409_404_416  # the matrices of the layers, halved; the five norms of each stay
    saved = sizes["bfloat16", "bfloat16"][0] - sizes["fp8", "bfloat16"][0]
    assert abs(saved - layers) < 0.002 * layers


def test_an_engine_that_shares_embeddings_loads_two_vocabularies_less() -> None:
    own, shared = (plan_memory(CONFIG, Wish(shares_embeddings=s)).weights for s in (False, True))
    assert own - shared == 2 * 163_840 * 7168 * 2


@given(sequences=st.integers(1, 128), context=st.sampled_from([1024, 32768, 131072]))
def test_the_room_of_a_device_is_exactly_what_fits(sequences: int, context: int) -> None:
    wish = Wish(devices_gb=(32,))
    room = dict(DraftMemory(CONFIG, wish).room(32, [context]).sequences)[context]
    fits = DraftMemory(CONFIG, wish).cell(context, sequences).device_gb == 32
    assert fits == (sequences <= room)


def test_a_device_too_small_for_the_weights_has_no_room() -> None:
    room = plan_memory(CONFIG, Wish(devices_gb=(8,))).rooms[0]
    assert room.tokens == 0
    assert {n for _, n in room.sequences} == {0}


def test_contexts_beyond_the_window_are_left_out() -> None:
    plan = plan_memory(tiny_config(), Wish(contexts=(512, 8192)))
    assert {cell.context for cell in plan.cells} == {512, 2048}


def test_measured_overhead_replaces_the_assumption() -> None:
    none = Overhead(0, 0, 0)
    plain, measured = (plan_memory(CONFIG, replace(Wish(), overhead=o)).cells[0] for o in (Overhead(), none))
    assert measured.total == plain.total - Overhead().bytes(1)
