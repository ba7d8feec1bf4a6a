"""What must travel for Kimi K3, and the bound on speed-up that a bandwidth leaves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.checkpoint.published import published_config
from k3dspark.deploy.items import word
from k3dspark.deploy.links import Load, bound, load_of, needed_bytes_per_second
from k3dspark.deploy.measured_checks import link_items, operator_items

K3 = load_of(published_config(), requests=64, step_ms=20.0)


@dataclass
class Link:
    bytes_per_second: float
    latency_ms: float = 0.0
    source: str = "a"
    destination: str = "b"
    backend: str = "hccl"


def test_a_verified_token_of_kimi_k3_brings_five_hidden_states() -> None:
    assert K3.hidden_bytes == 5 * 7168 * 2
    assert (K3.rows, K3.round_bytes) == (64 * 8, 512 * 71_680)
    assert K3.bytes_per_second == pytest.approx(36_700_160 * 50)


def test_a_fast_link_costs_nothing_worth_mention_and_a_slow_one_the_whole_gain() -> None:
    fast, slow = bound(K3, 100e9), bound(K3, 1.25e9 / 10)
    assert fast.speed_up == pytest.approx(8 / (1 + 36_700_160 / 100e9 / 0.020))
    assert fast.speed_up > 7.8
    assert slow.transfer_ms == pytest.approx(293.6, abs=0.1)
    assert slow.speed_up == pytest.approx(0.51, abs=0.01)


LOADS = st.builds(
    Load,
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    st.floats(1, 1000),
    st.floats(0.1, 1000),
    st.integers(1, 16),
)


@given(LOADS, st.floats(1e6, 1e12), st.floats(1e6, 1e12))
def test_more_bandwidth_never_lowers_the_bound_and_the_bound_never_exceeds_the_block(
    load: Load, first: float, second: float
) -> None:
    slow, fast = sorted((first, second))
    assert bound(load, slow).speed_up <= bound(load, fast).speed_up <= load.block + 1


@given(LOADS, st.floats(0.01, 1.0))
def test_the_needed_bandwidth_is_where_the_share_is_met(load: Load, share: float) -> None:
    needed = needed_bytes_per_second(load, share)
    assert bound(load, needed).share_of_step == pytest.approx(share)


@pytest.mark.parametrize(("rate", "status"), [(200e9, "pass"), (10e9, "warn"), (1e9, "fail")])
def test_a_link_is_judged_by_its_share_of_a_step(rate: float, status: str) -> None:
    items = list(link_items(K3, 64, [Link(rate)], {}))
    assert [item.status for item in items] == ["pass", status]
    assert "takes 36.70 GB/s" in word(items[1], "en").evidence or status == "pass"


@dataclass
class Operator:
    error: float | None
    problem: str = ""
    name: str = "rms_norm"
    shape: str = "[8, 7168]"
    tolerance: float = 1e-2
    milliseconds: float | None = 0.1
    implementation: str = "local"


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        (Operator(1e-3), "pass", "error 1.0e-03"),
        (Operator(1e-3, "npu_rms_norm: AttributeError"), "warn", "the local implementation stands in"),
        (Operator(0.5, "local: error 5.0e-01"), "fail", "more than 1e-02"),
        (Operator(float("nan")), "fail", "more than"),
        (Operator(None, "local: RuntimeError: no kernel"), "fail", "does not run here"),
    ],
)
def test_an_operator_passes_falls_back_or_fails(result: Operator, status: str, words: str) -> None:
    (item,) = operator_items([result])
    assert item.status == status
    assert words in word(item, "en").evidence
    assert bool(word(item, "zh").remedy) == (status != "pass")
