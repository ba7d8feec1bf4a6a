"""Schedulers: what they choose, and that their choice never looks at what it may not see (spec E)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.laws import Model, drafted_paths, proposal_of, random_model, round_law
from k3dspark.decoding import CostAware, FixedLength, FullBlock, Load, Outcome, Scheduler, StepCosts, Threshold
from k3dspark.decoding.calibration import Calibration, Scaling
from k3dspark.decoding.schedule import acceptance, allocate, best_capacity, early_stop, foresight
from k3dspark.decoding.verify import verify_block, verify_token
from k3dspark.errors import BadInput

VERIFIERS = {"block": verify_block, "token": verify_token}
FREE = StepCosts.synthetic(base=1.0, per_token=1e-9, knee=1)


def costs_of(*speeds: float, first: int = 1) -> StepCosts:
    """Costs whose rounds per second with `first`, `first`+1, … rows are these."""
    return StepCosts(draft=((1, 1e-12),), verify=tuple((first + i, 1 / s) for i, s in enumerate(speeds)))


def load(*limits: int) -> Load:
    return Load(tuple(range(len(limits))), (10,) * len(limits), limits)


def logits(*rows: Sequence[float]) -> torch.Tensor:
    """Confidence logits of acceptance probabilities."""
    return torch.logit(torch.tensor(rows, dtype=torch.float64))


# -- what they choose


def test_early_stop_on_the_example_of_the_specification() -> None:
    survival = np.array([[0.9, 0.72, 0.36], [0.5, 0.2, 0.02]])
    assert early_stop(survival, (3, 3), costs_of(100, 98, 95, 70, first=2)) == (2, 0)


def test_early_stop_takes_everything_where_rows_are_free() -> None:
    assert early_stop(np.array([[0.9, 0.5, 0.1]]), (3,), FREE) == (3,)


def test_early_stop_does_not_cross_a_step_in_the_cost_curve_but_capacity_does() -> None:
    stairs = StepCosts.synthetic(base=1.0, per_token=0.1, knee=1, step=8)
    survival = np.full((2, 7), 0.95).cumprod(1)
    assert sum(early_stop(survival, (7, 7), stairs)) == 6  # 8 rows
    assert best_capacity(survival, (7, 7), stairs) == 14  # 16 rows


def test_foresight_crosses_a_step_only_where_past_rounds_promise_enough_behind_it() -> None:
    stairs = StepCosts.synthetic(base=1.0, per_token=0.1, knee=1, step=4)  # rows 1 to 4, then 5 to 8
    survival, steep = np.full(7, 0.95).cumprod(), np.full(7, 0.1).cumprod()
    assert foresight(survival, survival, 7, stairs) == 7
    assert foresight(survival, steep, 7, stairs) == 3
    assert foresight(steep, survival, 7, stairs) == 3
    assert foresight(survival, survival, 2, stairs) == 2
    assert foresight(survival, survival, 0, stairs) == 0


def test_foresight_is_early_stop_where_every_row_costs_the_same() -> None:
    costs = StepCosts.synthetic(base=1.0, per_token=0.2, knee=1)
    random = np.random.default_rng(0)
    for _ in range(200):
        survival, past = random.random((2, 7)).cumprod(1)
        assert (foresight(survival, past, 7, costs),) == early_stop(survival[None], (7,), costs)


def test_slots_beyond_a_limit_are_never_given() -> None:
    survival = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    assert early_stop(survival, (1, 0), FREE) == (1, 0)
    assert allocate(survival, (1, 2), 3) == (1, 2)
    assert best_capacity(survival, (1, 0), FREE) == 1


def test_ties_go_to_the_earlier_slot_then_to_the_earlier_request() -> None:
    survival = np.ones((3, 2))
    assert allocate(survival, (2, 2, 2), 3) == (1, 1, 1)
    assert allocate(survival, (2, 2, 2), 4) == (2, 1, 1)


@pytest.mark.parametrize(("of", "expected"), [("survival", (1, 0)), ("confidence", (3, 0))])
def test_threshold_takes_leading_slots(of: str, expected: tuple[int, ...]) -> None:
    scheduler = Threshold(0.75, of=of)  # type: ignore[arg-type]
    assert scheduler.lengths(logits([0.8, 0.8, 0.8, 0.5], [0.7, 0.9, 0.9, 0.9]), load(4, 4)) == expected


def test_fixed_length_is_cut_to_what_fits() -> None:
    assert FixedLength(3).lengths(torch.zeros(3, 7), load(7, 2, 0)) == (3, 2, 0)


def test_each_request_is_calibrated_for_its_own_setting() -> None:
    calibration = Calibration({"greedy": Scaling((2.0, 0.5, 1.0), (0.0, 0.0, -1.0))})
    now = replace(load(3, 3), settings=("greedy", "temperature=1"))
    c = Threshold(0.5, calibration=calibration).acceptance(torch.tensor([[2.0, -2.0, 0.0]] * 2), now)
    np.testing.assert_allclose(c, 1 / (1 + np.exp([[-1.0, 4.0, 1.0], [-2.0, 2.0, 0.0]])))


def test_extreme_and_broken_confidence_stays_a_probability() -> None:
    c = acceptance(np.array([[1e9, -1e9, float("nan")]]))
    assert (c >= 0).all()
    assert (c <= 1).all()
    assert c[0, 2] < 1e-12


@pytest.mark.parametrize("make", [lambda: Threshold(1.5), lambda: FixedLength(-1), lambda: CostAware(FREE, form="x")])
def test_nonsense_scheduler_is_refused(make: Callable[[], Scheduler]) -> None:
    with pytest.raises(BadInput):
        make()


@pytest.mark.parametrize("verify", [(), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((0, 1.0),), ((1, float("nan")),)])
def test_nonsense_costs_are_refused(verify: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(BadInput, match="verify costs"):
        StepCosts(draft=((1, 1.0),), verify=verify)


def test_costs_are_interpolated_between_points_and_extended_beyond() -> None:
    costs = StepCosts(draft=((1, 1.0), (3, 2.0)), verify=((1, 10.0), (8, 17.0)))
    assert costs.seconds(0, 1) == 10.0
    assert costs.seconds(2, 4) == 1.5 + 13.0
    assert costs.seconds(5, 10) == 3.0 + 19.0
    np.testing.assert_allclose(costs.seconds(1, np.array([1, 8])), [11.0, 18.0])


# -- history


def play(scheduler: Scheduler, rounds: int, accepted: int) -> list[int]:
    """Lengths of rounds of one request in which `accepted` drafted tokens always stand; −1: not drafted."""
    lengths = []
    for _ in range(rounds):
        now = load(7) if scheduler.wants_draft(load(7))[0] else load(0)
        (length,) = scheduler.lengths(torch.zeros(1, 7), now)
        lengths.append(length if now.limits[0] else -1)
        scheduler.observe(Outcome(now, (length,), (min(accepted, length),), 1.0, 1.0))
    return lengths


def test_hopeless_request_is_decoded_plainly_and_probed_now_and_then() -> None:
    scheduler = CostAware(StepCosts.synthetic(1.0, 1e-6, 1, draft=0.5), probe_every=10)
    lengths = play(scheduler, 200, accepted=0)
    skipped = lengths[100:]
    assert skipped.count(-1) == 90
    assert scheduler.wants_draft(load(7)) in ((True,), (False,))


def test_request_that_recovers_is_drafted_again() -> None:
    scheduler = CostAware(StepCosts.synthetic(1.0, 1e-6, 1, draft=0.5), probe_every=5)
    play(scheduler, 100, accepted=0)
    assert -1 not in play(scheduler, 200, accepted=7)[-20:]


def test_paying_request_is_never_skipped() -> None:
    assert -1 not in play(CostAware(StepCosts.synthetic(1.0, 1e-6, 1, draft=0.5)), 100, accepted=2)


def test_new_request_is_treated_as_full_length() -> None:
    assert CostAware(FREE).lengths(torch.full((1, 7), 3.0), load(7)) == (7,)


def test_slots_that_promise_less_than_the_costs_are_known_to_are_left_out() -> None:
    hopeless_from_third = torch.tensor([[2.0, 1.0, -6.0, 0.0, 0.0, 0.0, 0.0]])
    scheduler = CostAware(FREE)
    for _ in range(20):
        lengths = scheduler.lengths(hopeless_from_third, load(7))
    assert lengths == (2,)


@pytest.mark.parametrize("alone", [True, False])
def test_slots_that_cost_nothing_are_taken_however_little_they_promise(alone: bool) -> None:
    hopeless = torch.full((1, 7), -6.0)
    scheduler = CostAware(costs_of(1, 1, 1, 1, 0.5, 0.45, 0.4, 0.35), alone=alone)
    for _ in range(20):
        lengths = scheduler.lengths(hopeless, load(7))
    assert lengths == (3,)
    assert CostAware(costs_of(*[1.0] * 8), alone=alone).lengths(hopeless, load(7)) == (7,)


def test_requests_that_left_are_forgotten_in_the_end() -> None:
    scheduler = CostAware(FREE)
    for request in range(2 * CostAware.REMEMBERED):
        scheduler.wants_draft(Load((request,), (10,), (7,)))
    assert len(scheduler._memory) == CostAware.REMEMBERED + 1


def test_request_that_stepped_back_goes_on_with_what_it_had_learnt() -> None:
    scheduler = CostAware(StepCosts.synthetic(1.0, 1e-6, 1, draft=0.5))
    play(scheduler, 100, accepted=0)
    assert scheduler.wants_draft(Load((5,), (10,), (7,))) == (True,)
    assert scheduler.wants_draft(load(7)) == (False,)


@pytest.mark.parametrize("form", ["early_stop", "capacity"])
def test_planned_alone_a_request_has_the_same_lengths_in_any_company(form: Literal["early_stop", "capacity"]) -> None:
    costs = costs_of(1, 0.9, 0.8, 0.6, 0.5, 0.45, 0.4, 0.35)
    random = np.random.default_rng(0)
    rounds = torch.from_numpy(random.normal(0.5, 1.5, (40, 3, 7)))
    accepted = random.integers(0, 4, (40, 3))

    def lengths(members: tuple[int, ...]) -> list[tuple[int, ...]]:
        scheduler, found = CostAware(costs, form, alone=True), []
        for confidence, stood in zip(rounds, accepted, strict=True):
            now = Load(members, (10,) * len(members), (7,) * len(members))
            wanted = scheduler.wants_draft(now)
            now = replace(now, limits=tuple(7 if w else 0 for w in wanted))
            chosen = scheduler.lengths(confidence[list(members)], now)
            counts = tuple(min(int(stood[m]), n) for m, n in zip(members, chosen, strict=True))
            scheduler.observe(Outcome(now, chosen, counts, 1.0, 1.0))
            found.append(chosen)
        return found

    together = lengths((0, 1, 2))
    for member in range(3):
        assert [row[member] for row in together] == [n for (n,) in lengths((member,))]
    assert len({n for row in together for n in row}) > 2, "the lengths must vary for this to prove anything"


# -- what they may not see

RULES: dict[str, Callable[[], Scheduler]] = {
    "full": FullBlock,
    "fixed": lambda: FixedLength(2),
    "threshold on survival": lambda: Threshold(0.4),
    "threshold on confidence": lambda: Threshold(0.4, of="confidence"),
    "cost, early stop": lambda: CostAware(costs_of(1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3), "early_stop"),
    "cost, capacity": lambda: CostAware(costs_of(1, 0.9, 0.85, 0.6, 0.5, 0.4, 0.35, 0.3), "capacity"),
    # One row more doubles the cost and the next are nearly free: a rule that looks ahead would act on it here.
    "steep, early stop": lambda: CostAware(costs_of(1, 0.5, 0.49, 0.48, 0.3, 0.29, 0.28, 0.27), "early_stop"),
    "steep, capacity": lambda: CostAware(costs_of(1, 0.5, 0.49, 0.48, 0.3, 0.29, 0.28, 0.27), "capacity"),
    "shared, early stop": lambda: CostAware(costs_of(1, 0.9, 0.82, 0.6, 0.5, first=2), "early_stop"),
    "shared, capacity": lambda: CostAware(costs_of(1, 0.9, 0.82, 0.6, 0.5, first=2), "capacity"),
    # Rows of one tile cost the same: all within it, or the first two only.
    "one tile, alone": lambda: CostAware(costs_of(1, 1, 1, 1, 1, 1, 1, 1), "capacity", alone=True),
    "two free rows, alone": lambda: CostAware(costs_of(1, 1, 1, 0.5, 0.4, 0.35, 0.3, 0.25), "capacity", alone=True),
}


def warmed(rule: str, slots: int = 3) -> Scheduler:
    """A scheduler with one past round behind it."""
    scheduler = RULES[rule]()
    past = Load((0, 1, 2), (10, 10, 10), (slots,) * 3)
    scheduler.wants_draft(past)
    confidence = logits([0.9, 0.8, 0.3], [0.5, 0.5, 0.5], [0.9, 0.2, 0.1])
    lengths = scheduler.lengths(confidence[:, :slots], past)
    scheduler.observe(Outcome(past, lengths, tuple(min(1, n) for n in lengths), 1.0, 1.0))
    return scheduler


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(
    confidence=st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=3),
    later=st.lists(st.floats(-6, 6), min_size=3, max_size=3),
    request=st.integers(0, 2),
    slot=st.integers(1, 3),
)
def test_admission_of_a_slot_ignores_what_its_own_token_decides(
    rule: str, confidence: list[list[float]], later: list[float], request: int, slot: int
) -> None:
    """Columns from `slot` on depend on token `slot`; whether that token is verified may not (spec E.4)."""
    request = min(request, len(confidence) - 1)
    changed = [list(row) for row in confidence]
    changed[request][slot:] = later[slot:]
    now = load(*(3,) * len(confidence))
    before = warmed(rule).lengths(torch.tensor(confidence), now)[request] >= slot
    after = warmed(rule).lengths(torch.tensor(changed), now)[request] >= slot
    assert before == after


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_scheduled_output_law_is_the_targets(verifier: str, rule: str) -> None:
    """Confidence that knows everything up to the slot's own token, lengths that follow it: still exact."""
    vocab, slots = 3, 3
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        target, draft = random_model(vocab, slots, random), random_model(vocab, slots, random)
        confidence = confidences(draft, random)
        drafted = drafted_paths(draft, slots)
        lengths = [warmed(rule).lengths(confidence[path][None], load(slots))[0] for path, _ in drafted]
        proposal = proposal_of(draft, [path for path, _ in drafted])
        laws = round_law(VERIFIERS[verifier], verifier == "block", target, proposal, draft, lengths)
        law = sum(chance * law for (_, chance), law in zip(drafted, laws, strict=True))
        torch.testing.assert_close(law, target.law(), rtol=0, atol=1e-12)


def confidences(draft: Model, random: torch.Generator) -> dict[tuple[int, ...], torch.Tensor]:
    """Logits [K] for every path; column k is a function of the first k tokens only."""
    of_prefix = {path: float(torch.randn((), generator=random) * 2) for path in draft.rows}
    return {
        path: torch.tensor([of_prefix[path[:k]] for k in range(draft.depth)], dtype=torch.float64)
        for path in product(range(draft.vocab), repeat=draft.depth)
    }


@pytest.mark.parametrize("rule", ["shared, early stop", "shared, capacity"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_two_requests_that_share_a_budget_are_jointly_lossless(verifier: str, rule: str) -> None:
    vocab, slots = 2, 2
    seen = set()
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        targets = [random_model(vocab, slots, random) for _ in range(2)]
        drafts = [random_model(vocab, slots, random) for _ in range(2)]
        confidence = [confidences(draft, random) for draft in drafts]
        drafted = [drafted_paths(draft, slots) for draft in drafts]
        laws = [laws_by_length(verifier, *both) for both in zip(targets, drafts, drafted, strict=True)]
        joint = torch.zeros(vocab**3, vocab**3, dtype=torch.float64)
        for (a, (path_a, chance_a)), (b, (path_b, chance_b)) in product(*(enumerate(own) for own in drafted)):
            both = torch.stack([confidence[0][path_a], confidence[1][path_b]])
            lengths = warmed(rule, slots).lengths(both, load(slots, slots))
            seen.add((seed, lengths))
            law_a, law_b = laws[0][lengths[0]][a], laws[1][lengths[1]][b]
            joint += chance_a * chance_b * torch.outer(law_a.flatten(), law_b.flatten())
        product_law = torch.outer(targets[0].law().flatten(), targets[1].law().flatten())
        torch.testing.assert_close(joint, product_law, rtol=0, atol=1e-12)
    assert len(seen) > 7, "the schedule must depend on the drafts for this to prove anything"


def laws_by_length(
    verifier: str, target: Model, draft: Model, drafted: Sequence[tuple[tuple[int, ...], float]]
) -> list[list[torch.Tensor]]:
    """Output law of every drafted path at every verify length."""
    proposal = proposal_of(draft, [path for path, _ in drafted])
    return [
        round_law(VERIFIERS[verifier], verifier == "block", target, proposal, draft, [length] * len(drafted))
        for length in range(draft.depth + 1)
    ]


def counterexample(choose: Callable[[np.ndarray], int]) -> list[float]:
    """Spec E.4: law of the first output token when `choose(survival)` sets the length of each drafted path."""
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    target, draft = (
        Model(2, 2, dict.fromkeys([(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)], row)) for row in (p, q)
    )
    drafted = drafted_paths(draft, 2)
    lengths = [choose(np.array([[0.8, 0.8 * (0.9, 0.0)[path[0]]]])) for path, _ in drafted]
    laws = round_law(verify_token, False, target, proposal_of(draft, [path for path, _ in drafted]), draft, lengths)
    law = sum(chance * law for (_, chance), law in zip(drafted, laws, strict=True))
    return law.sum((1, 2)).tolist()  # type: ignore[union-attr]


def test_a_best_over_fresh_survivals_is_biased() -> None:
    """The forbidden rule, run on purpose: it verifies exactly when the first token is A."""
    costs = costs_of(1, 0.5, 0.45)
    law = counterexample(lambda survival: best_capacity(survival, (2,), costs))
    assert law == pytest.approx([0.85, 0.15], abs=1e-12)


@pytest.mark.parametrize("form", ["early_stop", "capacity"])
@pytest.mark.parametrize("past", [0.1, 0.5, 0.9])
def test_cost_aware_schedule_is_exact_on_the_same_example(form: Literal["early_stop", "capacity"], past: float) -> None:
    def choose(survival: np.ndarray) -> int:
        scheduler = CostAware(costs_of(1, 0.5, 0.45), form)
        scheduler.lengths(logits([past, past]), load(2))
        fresh = [survival[0, 0], survival[0, 1] / survival[0, 0]]
        return scheduler.lengths(logits(fresh), load(2))[0]

    assert counterexample(choose) == pytest.approx([0.7, 0.3], abs=1e-12)


def test_early_stop_is_exact_on_the_same_example() -> None:
    costs = costs_of(1, 0.5, 0.45)
    law = counterexample(lambda survival: early_stop(survival, (2,), costs)[0])
    assert law == pytest.approx([0.7, 0.3], abs=1e-12)
    assert early_stop(np.array([[0.8, 0.72]]), (2,), costs) == (0,)
