"""The engine: limits, the edge of the window, several requests at once, faults and cancellation."""

from __future__ import annotations

import pytest
import torch

from k3dspark.decoding import Engine, FinishReason, SamplingParams
from k3dspark.decoding.judge import first_maximum
from k3dspark.errors import BadInput, EngineFault
from toy_models import ToyTarget, oracle, toy_draft


@pytest.mark.parametrize("prompt_length", [1, 20, 22, 23, 28, 29, 30, 31])
@pytest.mark.parametrize("perfect", [True, False])
def test_decoding_runs_to_the_exact_end_of_the_window(prompt_length: int, perfect: bool) -> None:
    target = ToyTarget(max_positions=32)
    prompt = [i % 11 for i in range(prompt_length)]
    expected = target.greedy(prompt, 32 - prompt_length)
    draft = oracle(target, prompt, 32 - prompt_length) if perfect else toy_draft(target)
    result = Engine(target, draft).generate(prompt, SamplingParams(max_new_tokens=1000))
    assert list(result.token_ids) == expected
    assert result.finish_reason == FinishReason.LENGTH


def test_draft_with_a_shorter_window_than_the_target_still_decodes() -> None:
    target = ToyTarget()
    draft = toy_draft(target, max_position_embeddings=16)
    assert list(Engine(target, draft).generate([1, 2], SamplingParams(60)).token_ids) == target.greedy([1, 2], 60)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (list(range(11)) * 6, "66 tokens"),
        ([3, 11], "id 11"),
        ([-1], "id -1"),
        (["a"], "not a list of token ids"),
    ],
)
def test_unusable_prompt_is_refused_before_anything_is_allocated(prompt: list[int], message: str) -> None:
    target = ToyTarget()
    with pytest.raises(BadInput, match=message):
        Engine(target).submit(prompt)
    assert target.open_sequences == 0


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_nonsense_limit_is_refused(count: int) -> None:
    with pytest.raises(BadInput, match="max_new_tokens"):
        SamplingParams(max_new_tokens=count)


def test_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="stop_token_ids contains token id 99"):
        Engine(ToyTarget()).submit([1], SamplingParams(stop_token_ids=(99,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [0, 1], "num_target_layers": 2}, "tap layers"),
        ({"target_hidden_size": 9}, "hidden size"),
        ({"vocab_size": 13, "draft_vocab_size": 13}, "vocabulary size"),
    ],
)
def test_draft_of_another_target_is_refused(changes: dict[str, object], message: str) -> None:
    target = ToyTarget()
    with pytest.raises(BadInput, match=message):
        Engine(target, toy_draft(target, **changes))


def test_requests_decode_together_as_they_would_alone() -> None:
    target = ToyTarget()
    draft = oracle(target, [3, 1], 60, lambda position: position % 5 == 0)
    engine = Engine(target, draft, prefill_chunk=3)
    jobs = [([3, 1], 30), ([5, 6, 7, 8, 9], 12), ([2], 21), ([3, 1, 4], 1)]
    requests = []
    for prompt, count in jobs:  # each joins while the others are under way
        requests.append(engine.submit(prompt, SamplingParams(count)))
        engine.step()
        engine.step()
    while not engine.idle:
        engine.step()
    assert [r.new_ids for r in requests] == [target.greedy(p, n) for p, n in jobs]
    assert target.open_sequences == 0


def test_batch_with_and_without_room_to_draft() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target))
    requests = [engine.submit([1, i], SamplingParams(count)) for i, count in enumerate((2, 30, 3, 2))]
    while not engine.idle:
        engine.step()
    assert [r.new_ids for r in requests] == [target.greedy([1, i], n) for i, n in enumerate((2, 30, 3, 2))]


def test_stream_yields_the_tokens_of_each_round() -> None:
    target = ToyTarget()
    stream = Engine(target, oracle(target, [3, 1], 60)).stream([3, 1], SamplingParams(20))
    pieces = list(stream)
    assert [len(p) for p in pieces] == [1, 8, 8, 3]
    assert [t for p in pieces for t in p] == list(stream.result.token_ids) == target.greedy([3, 1], 20)


def test_result_before_the_end_of_a_stream_is_an_error() -> None:
    stream = Engine(ToyTarget()).stream([3, 1])
    next(stream)
    with pytest.raises(BadInput, match="not exhausted"):
        _ = stream.result


def test_closed_stream_frees_its_sequence() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target))
    stream = engine.stream([3, 1], SamplingParams(40))
    next(stream)
    stream.close()
    assert target.open_sequences == 0
    assert engine.idle
    assert stream.result.finish_reason == FinishReason.CANCELLED


def test_cancelled_request_leaves_the_others_alone() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target), prefill_chunk=2)
    victim, other = engine.submit([1, 2, 3, 4, 5], SamplingParams(30)), engine.submit([4, 2], SamplingParams(20))
    engine.step()
    engine.cancel(victim)
    engine.cancel(victim)
    while not engine.idle:
        engine.step()
    assert other.new_ids == target.greedy([4, 2], 20)
    assert target.open_sequences == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("with_draft", [True, False])
def test_target_that_produces_nan_is_a_fault_and_not_a_token(bad: float, with_draft: bool) -> None:
    """The argmax of NaN is a token like any other, and looks like a draft that is never accepted (hazard I-39)."""
    target = ToyTarget()
    calls = iter(range(100))
    target.poison = lambda logits: logits.index_fill(1, torch.tensor([3]), bad) if next(calls) == 2 else logits
    engine = Engine(target, toy_draft(target) if with_draft else None)
    with pytest.raises(EngineFault, match="target produced NaN"):
        engine.generate([1, 2], SamplingParams(30))
    assert target.open_sequences == 0


def test_fault_in_prefill_is_reported() -> None:
    target = ToyTarget()
    target.poison = lambda logits: logits * float("nan")
    with pytest.raises(EngineFault, match="position 1"):
        Engine(target).generate([1, 2])
    assert target.open_sequences == 0


def test_draft_that_produces_nan_is_a_fault() -> None:
    target = ToyTarget()
    draft = toy_draft(target)
    draft.final_norm.weight.fill_(float("nan"))
    with pytest.raises(EngineFault, match="draft produced NaN"):
        Engine(target, draft).generate([1, 2], SamplingParams(30))


def test_fault_of_one_request_spares_the_others() -> None:
    target = ToyTarget()
    engine = Engine(target, toy_draft(target))
    requests = [engine.submit([1, i], SamplingParams(20)) for i in range(3)]
    for _ in range(3):
        engine.step()
    first_row = iter([1])
    # Row 0 belongs to the oldest request.
    target.poison = lambda logits: (
        logits.index_fill(0, torch.tensor([0]), float("nan")) if next(first_row, 0) else logits
    )
    while not engine.idle:
        engine.step()
    assert [r.finish_reason for r in requests] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert [r.new_ids for r in requests[1:]] == [target.greedy([1, i], 20) for i in (1, 2)]


@pytest.mark.parametrize("width", [512, 1536, 700])
def test_first_maximum_is_the_argmax_with_ties_going_to_the_smallest_id(width: int) -> None:
    logits = torch.randint(0, 4, (50, width)).float()
    best, choice = first_maximum(logits)
    assert torch.equal(choice, logits.argmax(-1))
    assert torch.equal(best, logits.amax(-1))


def test_first_maximum_lets_nan_through() -> None:
    logits = torch.zeros(2, 1024)
    logits[1, 700] = float("nan")
    best, choice = first_maximum(logits)
    assert best.isnan().tolist() == [False, True]
    assert choice.tolist() == [0, 700]
