"""The round: identical to plain decoding, whatever the draft says, and its caches never drift."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dspark.decoding import Engine, Request, SamplingParams
from k3dspark.errors import EngineFault
from k3dspark.model.draft import K3DSparkModel
from toy_models import ScriptedDraft, ToyTarget, oracle, toy_draft

K = 7


def new_ids(
    target: ToyTarget, draft: K3DSparkModel | None, prompt: Sequence[int], count: int, **engine: int
) -> list[int]:
    result = Engine(target, draft, **engine).generate(prompt, SamplingParams(max_new_tokens=count))
    return list(result.token_ids)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=12),
    count=st.integers(1, 30),
    wrong=st.floats(0, 1),
    chunk=st.integers(1, 13),
)
def test_greedy_tokens_are_those_of_plain_decoding(
    seed: int, prompt: list[int], count: int, wrong: float, chunk: int
) -> None:
    target = ToyTarget(seed=seed)
    answer = target.greedy(prompt, count)
    mistakes = random.Random(seed)
    errors = {position for position in range(64) if mistakes.random() < wrong}
    draft = oracle(target, prompt, count, errors.__contains__)
    assert new_ids(target, draft, prompt, count, prefill_chunk=chunk) == answer
    assert new_ids(target, None, prompt, count, prefill_chunk=chunk) == answer


@pytest.mark.parametrize("changes", [{}, {"block_causal": True}, {"markov_head_type": "rnn"}, {"block_size": 1}])
def test_random_network_as_draft_changes_no_token(changes: dict[str, object]) -> None:
    for seed in range(6):
        target = ToyTarget(vocab_size=5, seed=seed)
        draft = toy_draft(target, seed, **changes)
        assert new_ids(target, draft, [seed % 5, 1], 25) == target.greedy([seed % 5, 1], 25)


def test_draft_that_knows_the_answer_commits_a_whole_block_and_the_bonus() -> None:
    target = ToyTarget()
    engine = Engine(target, oracle(target, [3, 1], 60))
    stats = engine.generate([3, 1], SamplingParams(max_new_tokens=1 + 5 * (K + 1))).stats
    assert stats.acceptance_length == K + 1
    assert stats.rounds == 5
    assert stats.per_slot_acceptance == (1.0,) * K
    # 8 rows a round: the bonus row is verified too.
    assert target.forward_rows == [2, 8, 8, 8, 8, 8]


def test_draft_that_is_always_wrong_costs_no_token() -> None:
    target = ToyTarget()
    stats = Engine(target, oracle(target, [3, 1], 40, lambda _: True)).generate([3, 1], SamplingParams(20)).stats
    assert stats.acceptance_length == 1.0
    assert stats.rounds == 19


def test_the_first_slot_proposes_the_token_right_after_the_anchor() -> None:
    """With the shifted slots of DFlash the token after the anchor would never be proposed (hazard I-13)."""
    target = ToyTarget()
    draft = oracle(target, [3, 1], 40)
    assert isinstance(draft, ScriptedDraft)
    answer = [3, 1, *target.greedy([3, 1], 40)]
    anchors: list[tuple[int, int]] = []
    propose = draft.propose

    def watched(caches, anchor_ids, positions, sampling=None):  # type: ignore[no-untyped-def]
        anchors.extend(zip(positions.tolist(), anchor_ids.tolist(), strict=True))
        assert [c.length for c in caches] == positions.tolist()
        return propose(caches, anchor_ids, positions, sampling)

    draft.propose = watched  # type: ignore[method-assign]
    Engine(target, draft).generate([3, 1], SamplingParams(30))
    assert anchors == [(n, answer[n]) for n in (2, 10, 18, 26)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), wrong=st.floats(0, 1), chunk=st.integers(1, 9))
def test_context_rows_equal_a_rebuild_from_the_committed_tokens(seed: int, wrong: float, chunk: int) -> None:
    """Rejected rows, block rows or the anchor's own row left behind would differ (hazards I-10, I-11, I-12)."""
    target = ToyTarget(seed=seed)
    mistakes = random.Random(seed)
    errors = {position for position in range(64) if mistakes.random() < wrong}
    prompt = [mistakes.randrange(11) for _ in range(mistakes.randint(1, 10))]
    draft = oracle(target, prompt, 40, errors.__contains__)
    engine = Engine(target, draft, prefill_chunk=chunk)
    request = engine.submit(prompt, SamplingParams(40))
    rounds = 0
    while not request.finished:
        engine.step()
        if request.context is not None and not request.finished and request.new_ids:
            rounds += 1
            torch.testing.assert_close(held_rows(request), rebuilt_rows(target, draft, request), rtol=0, atol=1e-9)
    assert rounds > 3


def held_rows(request: Request) -> torch.Tensor:
    """Context rows [L, n, W] as the next round's draft pass will see them, bar those still waiting as taps."""
    assert request.context is not None
    return torch.stack([torch.cat(request.context.chunks(layer)) for layer in range(request.context.layers)])


def rebuilt_rows(target: ToyTarget, draft: K3DSparkModel, request: Request) -> torch.Tensor:
    assert request.context is not None
    committed = [*request.prompt_ids, *request.new_ids][: request.context.length]
    _, taps = target.run(torch.tensor(committed))
    return draft.context_rows(taps, torch.arange(len(committed)))


def test_context_is_as_long_as_the_target_cache_and_the_anchor_position() -> None:
    target = ToyTarget()
    draft = oracle(target, [3, 1], 40, lambda position: position % 3 == 0)
    engine = Engine(target, draft)
    request = engine.submit([3, 1], SamplingParams(30))
    while not request.finished:
        engine.step()
        if not request.finished:
            waiting = 0 if request.fresh_taps is None else len(request.fresh_taps)
            assert request.handle is not None
            assert request.context is not None
            assert request.context.length + waiting == target.length(request.handle) == request.anchor_position


@pytest.mark.parametrize("damage", ["row left behind", "row missing", "target not rolled back"])
def test_drifting_caches_stop_the_engine(damage: str) -> None:
    target = ToyTarget()
    engine = Engine(target, oracle(target, [3, 1], 40))
    request = engine.submit([3, 1], SamplingParams(30))
    engine.step()
    assert request.context is not None
    assert request.handle is not None
    if damage == "row left behind":
        request.context.append(torch.zeros(2, 1, 12, dtype=torch.float64))
    elif damage == "row missing":
        request.context.truncate(request.context.length - 1)
    else:
        target._committed[request.handle].append(0)
    with pytest.raises(EngineFault, match="three must be equal"):
        engine.step()


def test_verify_length_respects_the_remaining_budget_before_drafting() -> None:
    target = ToyTarget()
    draft = oracle(target, [3, 1], 40)
    result = Engine(target, draft).generate([3, 1], SamplingParams(max_new_tokens=4))
    # First token by prefill; three remain: two drafted and one bonus.
    assert target.forward_rows == [2, 3]
    assert list(result.token_ids) == target.greedy([3, 1], 4)
    assert result.stats.drafted == result.stats.accepted == 2


def test_nothing_is_drafted_for_a_last_single_token() -> None:
    target = ToyTarget()
    draft = oracle(target, [3, 1], 40)
    draft.propose = None  # type: ignore[method-assign, assignment]
    assert list(Engine(target, draft).generate([3, 1], SamplingParams(2)).token_ids) == target.greedy([3, 1], 2)


@pytest.mark.parametrize("after", [1, 2, 5, 8, 9, 13])
def test_stop_token_inside_the_accepted_prefix_cuts_the_commit(after: int) -> None:
    target = ToyTarget(seed=4)
    answer = target.greedy([3, 1], 20)
    stop = answer[after]
    first = answer.index(stop)
    for draft in (None, oracle(target, [3, 1], 40), oracle(target, [3, 1], 40, lambda n: n % 4 == 0)):
        result = Engine(target, draft).generate([3, 1], SamplingParams(20, stop_token_ids=(stop,)))
        assert list(result.token_ids) == answer[: first + 1]
        assert result.finish_reason == "stop"
        assert result.stats.committed + 1 == result.stats.new_tokens == first + 1
