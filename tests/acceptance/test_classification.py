"""What a difference is called, with generators whose logits are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from acceptance.scripted import END, Scripted, law, swap
from k3dspark.acceptance.asking import Answer, Question
from k3dspark.acceptance.classify import Kind
from k3dspark.acceptance.inputs import Input, InputSet
from k3dspark.acceptance.run import Acceptance, Plan, accept
from k3dspark.acceptance.verdict import Outcome


def questions(count: int = 6, tokens: int = 60, chats: int = 3) -> InputSet:
    ids = [
        Input(f"ids {n}", "ids", Question(token_ids=(n + 1, 2, 3), max_tokens=tokens, ignore_end=True))
        for n in range(count)
    ]
    talks = [
        Input(f"chat {n}", "chat", Question(messages=({"role": "user", "content": f"say {n}"},), max_tokens=tokens))
        for n in range(chats)
    ]
    return InputSet((*ids, *talks))


def run(candidate: Scripted, baseline: Scripted | None = None, **plan: object) -> Acceptance:
    return accept(baseline or Scripted(), candidate, questions(), Plan(**plan))  # type: ignore[arg-type]


def kinds(result: Acceptance) -> set[Kind]:
    return {divergence.kind for divergence in result.divergences}


def test_equal_sides_are_identical_and_the_bound_is_that_of_no_failure() -> None:
    result = run(Scripted())
    assert result.verdict.outcome is Outcome.IDENTICAL
    assert result.divergences == ()
    assert result.verdict.tokens >= 9 * 60
    assert result.verdict.bound == pytest.approx(1 - 0.05 ** (1 / result.verdict.tokens))


def test_rounding_makes_ties_and_they_are_accepted() -> None:
    def close(history: Sequence[int]) -> list[float]:
        """Every seventh token has a rival that is 0.001 behind."""
        logits = law(history)
        if len(history) % 7 == 0:
            best = max(range(len(logits)), key=logits.__getitem__)
            logits[best % 39 + 1] = logits[best] - 0.001
        return logits

    result = run(
        Scripted(close, wobble=0.01, wobble_seed=1), Scripted(close, wobble=0.01, wobble_seed=2), control=False
    )
    assert kinds(result) == {Kind.TIE}
    assert result.verdict.outcome is Outcome.EXPLAINED
    assert all(d.facts["baseline_gap"] < 0.1 for d in result.divergences)  # type: ignore[operator]


def test_a_baseline_that_wavers_explains_what_wavers_alike() -> None:
    class Wavering(Scripted):
        """Gives one of two answers, and the other one next time."""

        def ask(self, asked: Sequence[Question]) -> list[Answer]:
            self.name += "."
            return [swap(a, 10, 9) if len(self.name) % 2 else a for a in super().ask(asked)]

    baseline = Wavering(silent=True, name="even.")  # its cold answers are the law's own, its controls are not
    candidate = Scripted(silent=True, edit=lambda answer, _: swap(answer, 10, 9))
    result = accept(baseline, candidate, questions(chats=0), Plan())
    assert {d.kind for d in result.divergences if d.run == "cold"} == {Kind.VARIANCE}


def test_without_log_probabilities_a_tie_cannot_be_shown() -> None:
    result = run(Scripted(edit=lambda a, q: swap(a, 10) if q.max_tokens == 60 else a, silent=True))
    assert kinds(result) == {Kind.MISMATCH}
    assert "no log-probabilities" in result.divergences[0].evidence


def test_one_wrong_token_is_an_isolated_mismatch_where_it_is_and_the_rest_is_still_compared() -> None:
    def once(answer: Answer, question: Question) -> Answer:
        return swap(answer, 41) if question.token_ids == (3, 2, 3) else answer

    result = run(Scripted(edit=once))
    (divergence,) = result.divergences
    assert (divergence.input, divergence.at, divergence.kind, divergence.cause) == (
        "ids 2",
        41,
        Kind.MISMATCH,
        "isolated",
    )
    assert result.verdict.outcome is Outcome.DIFFERENT
    assert result.verdict.mismatches == 1
    resumed = next(tally for tally in result.tallies if tally.group == "resumed")
    assert resumed.tokens == 60 - 42


def test_a_wrong_token_that_the_candidate_believes_in_is_no_tie() -> None:
    def believing(history: Sequence[int]) -> list[float]:
        logits = law(history)
        if len(history) == 30:
            logits[5] = max(logits) + 0.2
        return logits

    result = run(Scripted(believing))
    assert kinds(result) == {Kind.MISMATCH}


def test_a_temperature_that_slipped_in_is_seen_in_the_candidates_own_log_probabilities() -> None:
    result = run(Scripted(slip=0.8))
    assert "candidate_sampled" in result.verdict.findings
    assert {d.cause for d in result.divergences if d.kind is Kind.MISMATCH} == {"sampled"}
    assert result.verdict.outcome is Outcome.DIFFERENT


def test_a_baseline_that_samples_is_no_baseline() -> None:
    result = run(Scripted(), Scripted(slip=0.8))
    assert "baseline_sampled" in result.verdict.findings
    assert result.verdict.outcome is Outcome.INCONCLUSIVE
    assert not result.verdict.accepted


def test_another_template_is_told_by_the_prompts() -> None:
    result = run(Scripted(template=(9, 9, 9)))
    assert kinds(result) == {Kind.PROMPT}
    assert {d.group for d in result.divergences} <= {"chat", "stop"}
    assert "template" in result.verdict.findings


def test_another_template_of_equal_length_is_told_by_prompts_given_as_ids() -> None:
    result = run(Scripted(template=(9, 9), tells_prompt=False), Scripted(tells_prompt=False))
    assert {d.kind for d in result.divergences if d.group == "chat"} == {Kind.PROMPT}
    assert result.verdict.outcome is Outcome.DIFFERENT


def test_a_token_dropped_at_a_stop_string_is_a_matter_of_stopping() -> None:
    def dropping(answer: Answer, question: Question) -> Answer:
        if not question.stop or answer.finish != "stop":
            return answer
        return replace(answer, token_ids=answer.token_ids[:-1], text=answer.text[:-2], scores=answer.scores[:-1])

    result = run(Scripted(edit=dropping))
    assert kinds(result) == {Kind.STOP}
    assert {d.run for d in result.divergences} == {"stop"}
    assert "stop" in result.verdict.findings


def test_an_end_token_that_only_one_side_lists_is_a_convention() -> None:
    def ending(history: Sequence[int]) -> list[float]:
        logits = law(history)
        logits[END] = 30.0 if len(history) > 25 else -20.0
        return logits

    def hide(answer: Answer, _: Question) -> Answer:
        if answer.finish != "stop" or answer.token_ids[-1] != END:
            return answer
        return replace(answer, token_ids=answer.token_ids[:-1], scores=answer.scores[:-1])

    result = accept(Scripted(ending), Scripted(ending, edit=hide), questions(0), Plan())
    assert result.verdict.outcome is Outcome.IDENTICAL


def test_a_candidate_that_goes_on_behind_the_end_handles_stops_wrongly() -> None:
    def ending(history: Sequence[int]) -> list[float]:
        logits = law(history)
        logits[END] = 30.0 if len(history) == 25 else -20.0
        return logits

    class Deaf(Scripted):
        def ask(self, asked: Sequence[Question]) -> list[Answer]:
            answers = super().ask([replace(question, ignore_end=True) for question in asked])
            return [drop_end(answer) for answer in answers]

    def drop_end(answer: Answer) -> Answer:
        at = answer.token_ids.index(END) if END in answer.token_ids else None
        return answer if at is None else swap(answer, at, 5)

    result = accept(Scripted(ending), Deaf(ending), questions(0), Plan())
    assert kinds(result) == {Kind.STOP}


def test_other_rounding_is_reported_even_where_no_token_differs() -> None:
    result = run(Scripted(lambda h: law(h, 30.0), wobble=0.05, wobble_seed=1), Scripted(lambda h: law(h, 30.0)))
    assert result.verdict.accepted
    assert "numerics" in result.verdict.findings


def test_other_weights_are_not_taken_for_rounding() -> None:
    result = run(Scripted(lambda history: law([*history, 1])))
    assert "other_model" in result.verdict.findings
    assert Kind.MISMATCH in kinds(result)
    assert result.verdict.outcome is Outcome.DIFFERENT


def test_both_sides_and_the_control_are_asked_in_the_same_company() -> None:
    sizes: list[int] = []

    class Counting(Scripted):
        def ask(self, asked: Sequence[Question]) -> list[Answer]:
            sizes.append(len(asked))
            return super().ask(asked)

    accept(Counting(), Counting(), questions(4, chats=0), Plan(concurrency=3))
    assert sizes == [3, 3, 1, 1, 3, 1, 2, 2]  # cold and control of the baseline; the candidate; stop probes of each


def test_warm_runs_share_a_salt_with_their_cold_run_and_controls_do_not() -> None:
    baseline, candidate = Scripted(has_cache=True), Scripted(has_cache=True)
    accept(baseline, candidate, questions(1, chats=0), Plan())
    cold, warm, control, _probe = (question.salt for question in baseline.asked)
    assert cold == warm
    assert cold != control
    assert candidate.asked[0].salt == candidate.asked[1].salt != cold
