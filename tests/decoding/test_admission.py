"""Limits on what runs at once: who waits, who steps back, and that nobody's output notices."""

from __future__ import annotations

import pytest

from k3dspark.decoding import Capacity, Engine, Request, SamplingParams
from k3dspark.errors import BadInput
from toy_models import ToyTarget, oracle, toy_draft

JOBS = [([3, 1], 30), ([5, 6, 7, 8, 9], 22), ([2], 31), ([3, 1, 4], 28)]


def drain(engine: Engine) -> list[int]:
    """Run to the end; the most target rows that were held after any step."""
    most = [0]
    while not engine.idle:
        engine.step()
        most.append(engine.rows)
    return most


def submit(engine: Engine, **sampling: float | int) -> list[Request]:
    return [engine.submit(p, SamplingParams(n, **sampling)) for p, n in JOBS]  # type: ignore[arg-type]


def test_no_more_requests_run_than_allowed_and_the_first_come_are_first_served() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target), capacity=Capacity(running=2))
    requests = submit(engine)
    together, started = 0, []
    while not engine.idle:
        engine.step()
        together = max(together, target.open_sequences)
        started += [r.id for r in requests if r.new_ids and r.id not in started]
    assert together == 2
    assert started == [0, 1, 2, 3]
    assert [r.new_ids for r in requests] == [target.greedy(p, n) for p, n in JOBS]


@pytest.mark.parametrize("rows", [36, 45, 60])
def test_preempted_requests_go_on_with_the_tokens_they_would_have_had(rows: int) -> None:
    target = ToyTarget()
    engine = Engine(target, oracle(target, [3, 1], 60), prefill_chunk=3, capacity=Capacity(rows=rows))
    requests = submit(engine)
    assert max(drain(engine)) <= rows
    assert sum(r.preemptions for r in requests) > 0
    assert requests[0].preemptions == 0, "the oldest never steps back"
    assert [r.new_ids for r in requests] == [target.greedy(p, n) for p, n in JOBS]
    assert target.open_sequences == 0


def test_preempted_samples_are_the_samples_of_the_request_alone() -> None:
    target = ToyTarget()
    draft = toy_draft(target)
    limited = Engine(target, draft, exact=True, prefill_chunk=3, capacity=Capacity(rows=40))
    together = submit(limited, temperature=1.0, seed=5)
    drain(limited)
    alone = [Engine(target, draft, exact=True).generate(p, SamplingParams(n, temperature=1.0, seed=5)) for p, n in JOBS]
    assert sum(r.preemptions for r in together) > 0
    assert [tuple(r.new_ids) for r in together] == [result.token_ids for result in alone]
    assert [r.stats.rounds for r in together] == [result.stats.rounds for result in alone]


def test_a_prompt_in_prefill_steps_back_and_its_context_rows_are_made_once() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target), prefill_chunk=2, capacity=Capacity(rows=40))
    oldest = engine.submit([1, 2], SamplingParams(38))
    while len(oldest.new_ids) < 10:
        engine.step()
    late = engine.submit([4] * 16, SamplingParams(4))
    while not oldest.finished:
        engine.step()
    drain(engine)
    assert late.new_ids == target.greedy([4] * 16, 4)
    assert oldest.new_ids == target.greedy([1, 2], 38)


def test_a_request_that_cannot_fit_alone_is_refused() -> None:
    engine = Engine(ToyTarget(), capacity=Capacity(rows=20))
    with pytest.raises(BadInput, match="needs 21 cache rows"):
        engine.submit([1, 2], SamplingParams(20))
    assert engine.idle
    engine.submit([1, 2], SamplingParams(19))
    assert max(drain(engine)) <= 20


def test_a_preempted_request_can_be_cancelled() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target), capacity=Capacity(rows=36))
    requests = submit(engine)
    while not any(r.preemptions for r in requests):
        engine.step()
    engine.cancel(next(r for r in requests if r.preemptions))
    drain(engine)
    assert target.open_sequences == 0


@pytest.mark.parametrize("capacity", [{"running": 0}, {"rows": -1}])
def test_a_limit_that_lets_nothing_run_is_refused(capacity: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="nothing could ever run"):
        Capacity(**capacity)
