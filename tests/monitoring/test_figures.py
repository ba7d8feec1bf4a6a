"""Figures of a window against figures computed by hand from the raw counters at its ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.monitoring.break_even import break_even
from k3dspark.monitoring.change import between
from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.figures import Figures, figures
from k3dspark.monitoring.histogram import Histogram
from k3dspark.monitoring.monitor import Costs, Monitor
from k3dspark.monitoring.ranks import read_ranks
from k3dspark.monitoring.scrape import Scrape
from scrapes import recorded, scrape, vllm

SOURCE = "http://a/metrics"


def window(before: str, after: str, seconds: float = 10.0) -> Figures:
    monitor = Monitor([SOURCE])
    monitor.feed([scrape(before, 100.0)])
    monitor.feed([scrape(after, 100.0 + seconds)])
    (model,) = monitor.snapshot().models
    return model.whole


def recorded_minute() -> Monitor:
    monitor = Monitor([SOURCE])
    monitor.feed([Scrape(SOURCE, 0.0, recorded("vllm-dp2-start"))])
    monitor.feed([Scrape(SOURCE, 60.0, recorded("vllm-dp2-end"))])
    return monitor


def test_counters_are_summed_over_ranks_and_differenced_over_the_window() -> None:
    whole = recorded_minute().snapshot().models[0].whole
    # 1000 + 600 rounds; accepted 8400 − 6100 and 5400 − 4100.
    assert (whole.rounds, whole.accepted, whole.drafted) == (1600, 2300 + 1300, 11200)
    assert whole.acceptance_length == 1 + 3600 / 1600
    assert whole.acceptance_rate == 3600 / 11200
    assert whole.tokens_per_second == pytest.approx((3000 + 1800) / 60)
    assert (whole.running, whole.waiting, whole.cache_usage) == (6.0, 2.0, 0.41)
    assert whole.prefix_hit_ratio == pytest.approx((4000 + 1200) / 20000)
    assert whole.notes == ()


def test_slots_of_the_window_are_shares_of_its_rounds() -> None:
    whole = recorded_minute().snapshot().models[0].whole
    assert whole.slots[0] == (780 + 460) / 1600
    assert whole.conditional_slots[1] == pytest.approx((540 + 310) / (780 + 460))
    assert sum(whole.slots) == pytest.approx((whole.acceptance_length or 0) - 1)


def test_each_rank_has_its_own_figures() -> None:
    ranks = recorded_minute().snapshot().models[0].ranks
    assert [rank.figures.acceptance_length for rank in ranks] == [1 + 2300 / 1000, 1 + 1300 / 600]


def test_vllm_s_time_between_tokens_is_a_round_s() -> None:
    whole = recorded_minute().snapshot().models[0].whole
    assert whole.round_seconds == pytest.approx((42.0 + 26.4) / 1600)
    assert whole.per_token is not None
    assert whole.per_token.mean == pytest.approx((0.15 + 0.08) / (8 + 4))


def test_break_even_is_the_round_s_time_in_plain_steps() -> None:
    whole = recorded_minute().snapshot().models[0].whole
    even = break_even(whole, plain_seconds=0.02)
    assert even is not None
    assert even.length == pytest.approx(42.75 / 20)
    assert even.speed_up == pytest.approx(3.25 / (42.75 / 20))
    assert break_even(whole) is None


def test_a_server_without_a_draft_tells_the_plain_step() -> None:
    labels = '{engine="0",model_name="m"}'

    def plain(steps: int) -> str:
        return (
            f"vllm:inter_token_latency_seconds_count{labels} {steps}\n"
            f"vllm:inter_token_latency_seconds_sum{labels} {steps * 0.019}\n"
        )

    monitor = Monitor([SOURCE], plain="http://plain/metrics")
    for time, name, steps in ((0.0, "vllm-dp2-start", 100), (60.0, "vllm-dp2-end", 300)):
        monitor.feed([Scrape(SOURCE, time, recorded(name)), scrape(plain(steps), time, "http://plain/metrics")])
    (model,) = monitor.snapshot().models
    assert model.break_even is not None
    assert (model.break_even.basis, model.break_even.length) == ("measured", pytest.approx(0.04275 / 0.019))


def test_our_own_phases_bound_the_break_even_from_below() -> None:
    labels = 'engine="0",model_name="m"'

    def own(rounds: int) -> str:
        lines = [f'k3dspark:engine_phase_seconds_total{{{labels},phase="{p}"}} {s * rounds}'
                 for p, s in (("draft", 0.01), ("verify", 0.035), ("host", 0.005), ("prefill", 9.0))]  # fmt: skip
        return "\n".join([f"k3dspark:spec_decode_num_rounds_total{{{labels}}} {rounds}", *lines]) + "\n"

    even = break_even(window(own(10), own(30)))
    assert even is not None
    assert (even.basis, even.length) == ("bound", pytest.approx(0.05 / 0.04))


def test_a_given_round_time_stands_in_for_an_engine_that_tells_none() -> None:
    monitor = Monitor([SOURCE], costs=Costs(plain_step=0.02, round=0.05))
    monitor.feed([scrape(vllm(10, [8, 4]), 0.0)])
    monitor.feed([scrape(vllm(20, [16, 8]), 1.0)])
    (model,) = monitor.snapshot().models
    assert model.break_even is not None
    assert model.break_even.length == pytest.approx(2.5)


@pytest.mark.parametrize(("name", "note"), [("sglang", False), ("sglang-bonus-in-rate", True)])
def test_sglang_s_rate_is_accepted_over_drafted_whatever_its_version_counts(name: str, note: bool) -> None:
    whole = figures([(rank, between(rank, rank)) for rank in read_ranks(recorded(name), "a", 0.0)])
    # Rounds a second: 340 / 3.4 and 150 / 3.0.
    assert whole.acceptance_length == pytest.approx((3.4 * 100 + 3.0 * 50) / 150)
    assert whole.acceptance_rate == pytest.approx((whole.acceptance_length - 1) / 7)
    assert ("rate_counts_the_bonus" in whole.notes) is note
    assert (whole.basis, whole.proposals_per_round, whole.running, whole.waiting) == ("gauges", 7, 12.0, 3.0)


def test_a_restart_counts_what_the_new_process_did_and_is_shown() -> None:
    whole = window(vllm(1000, [700, 400]), vllm(40, [30, 10]))
    assert (whole.rounds, whole.accepted, whole.resets) == (40, 40, 1)
    assert "counters_were_reset" in whole.notes


def test_a_restart_shows_even_if_the_new_process_has_already_counted_further() -> None:
    def created(text: str, at: float) -> str:
        return text + f'vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} {at}\n'

    whole = window(created(vllm(10, [7, 4]), 1.0), created(vllm(40, [30, 10]), 50.0))
    assert (whole.rounds, whole.resets) == (40, 1)


def test_slots_that_miss_some_ranks_are_noticed() -> None:
    whole = window(vllm(0, [0, 0]), vllm(1000, [350, 200], accepted=1100))
    assert "slots_do_not_add_up" in whole.notes


def test_an_idle_window_has_no_acceptance() -> None:
    whole = window(vllm(10, [5, 2]), vllm(10, [5, 2]))
    assert (whole.rounds, whole.acceptance_length, whole.acceptance_rate, whole.slots) == (0, None, None, ())


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=7, max_size=7)), min_size=1, max_size=4
    )
)
def test_acceptance_length_is_one_plus_the_slots(engines: list[tuple[int, list[float]]]) -> None:
    before = after = ""
    accepted = rounds = 0
    for engine, (count, shares) in enumerate(engines):
        # Accepted at slot k needs acceptance at every slot before it.
        slots = [int(count * share) for share in sorted(shares, reverse=True)]
        before += vllm(5, [3, 2, 1, 1, 0, 0, 0], str(engine))
        after += vllm(5 + count, [a + b for a, b in zip([3, 2, 1, 1, 0, 0, 0], slots, strict=True)], str(engine))
        accepted, rounds = accepted + sum(slots), rounds + count
    whole = window(before, after)
    if not rounds:
        assert whole.acceptance_length is None
        return
    assert whole.acceptance_length == pytest.approx(1 + accepted / rounds)
    assert whole.acceptance_length == pytest.approx(1 + sum(whole.slots))
    assert whole.acceptance_rate == pytest.approx(accepted / (7 * rounds))
    assert whole.notes == ()


def test_quantiles_lie_inside_their_bucket() -> None:
    times = Histogram(10, 6.0, {0.1: 2.0, 0.5: 8.0, 1.0: 10.0, float("inf"): 10.0})
    assert times.quantile(0.5) == pytest.approx(0.1 + 0.4 * 3 / 6)
    assert Histogram(3, 9.0, {1.0: 0.0, float("inf"): 3.0}).quantile(0.5) == 1.0
    assert Histogram().quantile(0.5) is None


def test_gauges_below_zero_are_left_out_of_sums() -> None:
    text = vllm(1, [1], more={"num_requests_running": -1})
    assert "running" not in read_ranks(parse(text), "a", 0.0)[0].gauges
