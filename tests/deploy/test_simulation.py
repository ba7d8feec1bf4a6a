"""The simulator agrees with closed forms, and every token that is asked for comes out once."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dspark.deploy.acceptance_profile import AcceptanceProfile, profile_from
from k3dspark.deploy.policies import Adaptive, ByBatch, Fixed, Policy
from k3dspark.deploy.simulation import Cluster, Result, Simulation, Workload
from k3dspark.deploy.step_costs import CostTable, costs_from
from k3dspark.errors import BadInput

SURVIVAL = (0.86, 0.71, 0.59, 0.48, 0.39, 0.32, 0.26)
PROFILE = profile_from({"survival": SURVIVAL}, "test")
ONE = Cluster()


def flat(plain: float, drafted: float) -> CostTable:
    """Steps whose time depends on nothing but whether there is a draft."""
    return costs_from({"format": 1, "steps": [
        {"requests": 1, "length": 0, "seconds": plain}, {"requests": 1, "length": 1, "seconds": drafted},
        {"requests": 64, "length": 0, "seconds": plain}, {"requests": 64, "length": 7, "seconds": drafted},
    ]})  # fmt: skip


def run(costs: CostTable, workload: Workload, cluster: Cluster = ONE, length: int = 7,
        profile: AcceptanceProfile = PROFILE, seed: int = 1) -> Result:  # fmt: skip
    return Simulation(costs, profile, cluster, workload, partial(Fixed, length), seed).run()


def test_one_user_gets_acceptance_length_tokens_a_step() -> None:
    result = run(flat(0.02, 0.03), Workload(requests=200, users=1, output_tokens=500))
    assert result.tokens_per_second == pytest.approx((1 + sum(SURVIVAL)) / 0.03, rel=0.03)
    assert result.acceptance_length == pytest.approx(1 + sum(SURVIVAL), rel=0.02)


def test_without_a_draft_a_full_batch_brings_one_token_for_each_request_and_step() -> None:
    result = run(flat(0.02, 0.03), Workload(requests=640, users=16, output_tokens=50, varied=False), length=0)
    assert result.tokens_per_second == pytest.approx(16 / 0.02)
    assert (result.drafted, result.rounds) == (0, 640 * 50)


def test_certain_acceptance_takes_the_fewest_steps_there_can_be() -> None:
    sure = profile_from({"survival": [1.0] * 7}, "test")
    result = run(flat(0.02, 0.03), Workload(requests=10, users=1, output_tokens=50, varied=False), profile=sure)
    assert result.steps == 10 * math.ceil(50 / 8)
    assert result.unused == 10 * (math.ceil(50 / 8) * 8 - 50)


def test_hopeless_drafts_only_cost_their_time() -> None:
    never = profile_from({"survival": [0.0]}, "test")
    drafted = run(flat(0.02, 0.03), Workload(requests=20, users=1), length=1, profile=never)
    assert drafted.accepted == 0
    assert drafted.tokens_per_second == pytest.approx(1 / 0.03)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_for_one_server_of_constant_time_is_that_of_an_m_d_1_queue(load: float) -> None:
    service = 0.01
    workload = Workload(requests=30_000, rate=load / service, output_tokens=1, varied=False)
    result = run(flat(service, 1.0), workload, Cluster(1, 1), length=0)
    # Pollaczek–Khinchine with no variance of the service time.
    assert result.waiting.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)
    assert result.busy_seconds / result.seconds == pytest.approx(load, rel=0.03)


def test_twice_the_replicas_serve_twice_the_users_at_the_same_speed() -> None:
    costs = flat(0.02, 0.03)
    one = run(costs, Workload(requests=400, users=8, output_tokens=100), Cluster(1, 8))
    two = run(costs, Workload(requests=800, users=16, output_tokens=100), Cluster(2, 8))
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second, rel=0.05)
    assert two.mean_batch == pytest.approx(one.mean_batch, rel=0.05)


def test_prompts_add_their_time_to_the_step_that_takes_them_in() -> None:
    base = Workload(requests=50, users=1, output_tokens=10, varied=False)
    costs = flat(0.02, 0.03)
    prompted = Workload(**{**vars(base), "prompt_tokens": 1000, "prefill_seconds_per_token": 1e-4})
    assert run(costs, prompted, length=0).seconds == pytest.approx(run(costs, base, length=0).seconds + 50 * 0.1)


def test_a_seed_repeats_a_run_and_another_one_does_not() -> None:
    workload = Workload(requests=50, users=4)
    results = [run(flat(0.02, 0.03), workload, seed=seed).seconds for seed in (3, 3, 4)]
    assert results[0] == results[1] != results[2]


def test_what_confidence_knows_changes_no_acceptance() -> None:
    known = AcceptanceProfile(PROFILE.survivals, PROFILE.weights, concentration=1.5)
    result = run(flat(0.02, 0.03), Workload(requests=300, users=8, output_tokens=300), profile=known)
    assert result.acceptance_length == pytest.approx(1 + sum(SURVIVAL), rel=0.02)


def test_kinds_of_requests_are_drawn_by_their_weight() -> None:
    mixed = profile_from({"classes": [{"weight": 3, "survival": [1.0]}, {"weight": 1, "survival": [0.0]}]}, "test")
    result = run(flat(0.02, 0.03), Workload(requests=4000, users=64, output_tokens=40, varied=False),
                 Cluster(1, 64), length=1, profile=mixed)  # fmt: skip
    # Three quarters need 20 rounds with one accepted each, one quarter 40 with none.
    assert result.accepted / result.rounds == pytest.approx(0.75 * 20 / (0.75 * 20 + 0.25 * 40), rel=0.03)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.integers(1, 60), replicas=st.integers(1, 4), sequences=st.integers(1, 9), output=st.integers(1, 40),
    users=st.integers(0, 30), length=st.integers(0, 7), varied=st.booleans(),
    kind=st.sampled_from(["fixed", "batch", "adaptive"]),
    concentration=st.sampled_from([None, 0.5, 20.0]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_token_asked_for_comes_out_once(
    requests: int, replicas: int, sequences: int, output: int, users: int, length: int, varied: bool, kind: str,
    concentration: float | None, seed: int,
) -> None:  # fmt: skip
    costs = flat(0.02, 0.03)
    policy: dict[str, Policy] = {
        "fixed": Fixed(length), "batch": ByBatch(((1, 2, 7), (3, 9, length))), "adaptive": Adaptive(costs),
    }  # fmt: skip
    workload = Workload(requests, users, 0.0 if users else 50.0, output, varied)
    profile = AcceptanceProfile(PROFILE.survivals, PROFILE.weights, concentration)
    chosen = policy[kind]
    result = Simulation(costs, profile, Cluster(replicas, sequences), workload, lambda: chosen, seed).run()
    assert result.requests == requests
    assert result.tokens == result.asked_tokens
    assert result.tokens == result.rounds + result.accepted - result.unused
    assert 0 <= result.accepted <= result.drafted <= 7 * result.rounds
    assert result.mean_batch <= sequences
    assert result.busy_seconds <= result.seconds * replicas + 1e-9
    assert np.all(result.waiting >= 0)
    assert np.all(result.per_token > 0)


def test_a_load_that_is_neither_or_both_is_refused() -> None:
    for workload in (Workload(), Workload(users=1, rate=1.0), Workload(requests=0, users=1)):
        with pytest.raises(BadInput):
            run(flat(0.02, 0.03), workload)
