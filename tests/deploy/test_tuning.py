"""The right draft length at each load, from costs and acceptance, and how it reaches the engine."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.checkpoint.published import published_config
from k3dspark.deploy.acceptance_profile import profile_from, read_profile
from k3dspark.deploy.launch_files import read_launch_directory, write_launch_files
from k3dspark.deploy.options import DraftFacts, LaunchWish
from k3dspark.deploy.policies import Adaptive, as_ranges, best_by_batch, best_length
from k3dspark.deploy.simulation import Cluster, Workload
from k3dspark.deploy.step_costs import CostTable, costs_from, read_costs
from k3dspark.deploy.tuning import Tuning, engine_option, tune, write_into
from k3dspark.errors import BadInput

PROFILE = profile_from({"survival": [0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26]}, "test")
K3 = DraftFacts.of(published_config())


def table(base: float = 0.02, draft: float = 0.004, row: float = 0.0004, knee: int = 16) -> CostTable:
    """Reading weights takes `base`; beyond `knee` rows each row costs `row`."""

    def seconds(requests: int, length: int) -> float:
        return base + (draft if length else 0.0) + row * max(requests * (length + 1) - knee, 0)

    return costs_from({"format": 1, "steps": [
        {"requests": r, "length": k, "seconds": seconds(r, k)} for r in (1, 2, 4, 8, 16, 32, 64) for k in range(8)
    ]})  # fmt: skip


@cache
def small_tuning(draft: float = 0.004, row: float = 0.0004) -> Tuning:
    workload = Workload(requests=40, output_tokens=40)
    return tune(table(draft=draft, row=row), PROFILE, Cluster(1, 32), workload, users=(1, 32))


def test_measured_points_come_back_exactly_and_others_lie_between() -> None:
    costs = table()
    assert costs.step(8, 3) == pytest.approx(0.02 + 0.004 + 0.0004 * (32 - 16))
    assert costs.step(8, 0) == pytest.approx(0.02)
    assert costs.step(8, 3) < costs.step(12, 3) < costs.step(16, 3)
    assert costs.drafted_step(8, 8 * 3) == pytest.approx(costs.step(8, 3))
    assert costs.step(128, 7) == pytest.approx(0.024 + 0.0004 * (128 * 8 - 16))


@given(requests=st.integers(1, 200), lengths=st.lists(st.floats(0, 10), min_size=2, max_size=5))
def test_more_tokens_never_take_less_time(requests: int, lengths: list[float]) -> None:
    times = table().drafted_steps(requests, np.sort(np.array(lengths)) * requests)
    assert np.all(np.diff(times) >= -1e-12)
    assert np.all(times > 0)


def test_the_best_length_is_the_one_a_hand_computes() -> None:
    costs = table()
    for batch in (1, 4, 16, 64):
        speeds = [PROFILE.length(k) / costs.step(batch, k) for k in range(8)]
        assert best_length(costs, PROFILE, batch, 7) == int(np.argmax(speeds))


def test_lengths_shrink_as_the_batch_grows_and_ranges_cover_it() -> None:
    ranges = best_by_batch(table(), PROFILE, 64, 7)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 64
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    assert ranges[0][2] == 7
    assert [length for _, _, length in ranges] == sorted((length for _, _, length in ranges), reverse=True)


def test_equal_neighbours_are_one_range() -> None:
    assert as_ranges([7, 7, 5, 5, 5, 0]) == ((1, 2, 7), (3, 5, 5), (6, 6, 0))


def test_a_draft_that_never_pays_is_not_used() -> None:
    dear = table(draft=1.0)
    assert best_by_batch(dear, PROFILE, 8, 7) == ((1, 8, 0),)
    tuning = small_tuning(draft=1.0)
    assert tuning.one_length == 0
    assert tuning.loads[0].best.policy in ("no draft", "by batch size")


def test_break_even_is_the_ratio_of_step_times() -> None:
    costs, tuning = table(), small_tuning()
    load = tuning.loads[0]
    assert load.batch == 1
    assert dict(load.break_even)[7] == pytest.approx(costs.step(1, 7) / costs.step(1, 0))


def test_the_table_is_never_much_worse_than_the_best_fixed_length() -> None:
    for load in small_tuning().loads:
        fixed = max(result.tokens_per_second for result in load.results[:8])
        assert load.named("by batch size").tokens_per_second > 0.93 * fixed


def test_adaptive_verifies_all_where_rows_are_free_and_little_where_they_are_dear() -> None:
    chances = np.tile(PROFILE.conditional(), (16, 1))
    lengths = {}
    for row in (0.0, 0.01):
        policy = Adaptive(table(row=row, knee=0))
        policy.lengths(chances)
        chosen = policy.lengths(chances)
        assert chosen is not None
        lengths[row] = int(chosen.sum())
    assert lengths[0.0] == 16 * 7
    assert lengths[0.01] < 16 * 3


def test_adaptive_gives_slots_to_those_who_are_likely_to_keep_them() -> None:
    likely, unlikely = np.full(7, 0.95), np.full(7, 0.2)
    policy = Adaptive(table(row=0.002, knee=0))
    chances = np.stack([likely, unlikely])
    policy.lengths(chances)
    chosen = policy.lengths(chances)
    assert chosen is not None
    assert chosen[0] > chosen[1]


def test_engines_get_their_own_option() -> None:
    tuning = small_tuning()
    vllm, sglang = engine_option(tuning, "vllm"), engine_option(tuning, "sglang")
    assert vllm["num_speculative_tokens"] == 7
    assert vllm["num_speculative_tokens_per_batch_size"] == [list(item) for item in tuning.table]
    assert sglang["--speculative-dspark-block-size"] == tuning.one_length
    assert sglang["SGLANG_RAGGED_VERIFY_MODE"] in ("static", "compact")


def test_one_length_for_every_batch_needs_no_table() -> None:
    assert engine_option(small_tuning(row=0.0), "vllm") == {"num_speculative_tokens": 7}


def test_a_tuning_is_written_into_the_launch_files(tmp_path: Path) -> None:
    wish = LaunchWish("vllm", "/d", "/t", devices=8, sequences=32)
    directory = write_launch_files(K3, wish, tmp_path / "plan")
    tuning = small_tuning()
    written = write_into(tuning, directory)
    assert written.settled.wish.lengths == tuning.table
    again = read_launch_directory(tmp_path / "plan")
    assert again.settled.wish.lengths == tuning.table
    assert f'"num_speculative_tokens_per_batch_size": {json.dumps(engine_option(tuning, "vllm")["num_speculative_tokens_per_batch_size"])}' in (tmp_path / "plan" / "node-0.sh").read_text()  # fmt: skip  # noqa: E501


def test_sglang_gets_one_block_size(tmp_path: Path) -> None:
    wish = LaunchWish("sglang", "/d", "/t", device="cuda", devices=8, build_has=("k3_mla_draft",))
    tuning = small_tuning()
    write_into(tuning, write_launch_files(K3, wish, tmp_path / "plan"))
    assert f"--speculative-dspark-block-size {tuning.one_length}" in (tmp_path / "plan" / "node-0.sh").read_text()


def test_a_longer_profile_than_the_drafts_block_is_refused(tmp_path: Path) -> None:
    long = profile_from({"survival": [0.99] * 12}, "test")
    tuning = tune(table(row=0.0), long, Cluster(1, 4), Workload(requests=5, output_tokens=5), users=(1,))
    with pytest.raises(BadInput, match="block of 7"):
        write_into(tuning, write_launch_files(K3, LaunchWish("vllm", "/d", "/t"), tmp_path / "plan"))


BAD_COSTS: list[tuple[dict[str, Any], str]] = [
    ({}, "format"),
    ({"format": 1, "steps": [3]}, "no object"),
    ({"format": 1, "steps": [{"requests": 0, "length": 0, "seconds": 1}]}, "whole numbers"),
    ({"format": 1, "steps": [{"requests": 1, "length": True, "seconds": 1}]}, "whole numbers"),
    ({"format": 1, "steps": [{"requests": 1, "length": 0, "seconds": -1}]}, "positive"),
    ({"format": 1, "steps": [{"requests": 1, "length": 0, "seconds": float("inf")}]}, "positive"),
    ({"format": 1, "steps": [{"requests": 1, "length": 3, "seconds": 1}]}, "without a draft"),
    ({"format": 1, "steps": [{"requests": 1, "length": 0, "seconds": 1}]}, "with a draft"),
]


@pytest.mark.parametrize(("mapping", "words"), BAD_COSTS, ids=[words for _, words in BAD_COSTS])
def test_a_cost_table_that_cannot_be_used_says_why(mapping: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        costs_from(mapping)
    assert words in refused.value.why
    (tmp_path / "costs.json").write_text("[1")
    with pytest.raises(BadInput):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize("text", ["0.5,x", "0.5,0.6", "1.2", "nowhere.json", "0.5,nan"])
def test_an_acceptance_that_cannot_be_used_says_why(text: str) -> None:
    with pytest.raises(BadInput):
        read_profile(text)


def test_acceptance_is_read_as_survivals_rates_or_from_generate(tmp_path: Path) -> None:
    assert read_profile("0.8,0.6").survivals == ((0.8, 0.6),)
    assert read_profile("0.8,0.9", conditional=True).survivals[0] == pytest.approx((0.8, 0.72))
    (tmp_path / "answer.json").write_text(json.dumps({"text": "x", "per_slot_acceptance": [0.5, 0.25]}))
    profile = read_profile(str(tmp_path / "answer.json"))
    assert profile.length(2) == 1.75
