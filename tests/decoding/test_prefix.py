"""Prefixes that come again: the same rows, bit for bit, and the draft's context rows with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from decoding.test_sampled import VERIFIERS, p_value
from k3dspark.decoding import Capacity, DecodeStats, Engine, Request, SamplingParams
from k3dspark.decoding.prefix import BLOCK
from k3dspark.decoding.round import TILE, Pair
from k3dspark.decoding.sampling import distribution
from k3dspark.decoding.schedule import FullBlock
from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.loading import open_target
from k3dspark.target.protocol import RaggedRows, State
from tiny_models import write_draft, write_target
from toy_models import ToyTarget, toy_draft

PLENTY = 4096
SYSTEM = [256, *(7 * i % 250 for i in range(100))]
GREEDY = SamplingParams(20)
SAMPLED = SamplingParams(20, temperature=0.9, top_p=0.95, seed=11)


@dataclass(frozen=True)
class Models:
    target: LlamaTarget
    draft: K3DSparkModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    root = tmp_path_factory.mktemp("models")
    target = open_target(write_target(root / "target"), dtype="float32", tap_layer_ids=(0, 2))
    assert isinstance(target, LlamaTarget)
    weight = target.embed(torch.arange(target.vocab_size))
    yield Models(target, load_draft(write_draft(root / "draft"), target_embed=weight, target_lm_head=weight).pack())
    assert not target._sequences, "every test leaves nothing open"


@dataclass(frozen=True)
class Done:
    """A finished request, and the context rows [L, n, W] that the draft read in its last round."""

    request: Request
    context: torch.Tensor

    @property
    def answer(self) -> list[int]:
        return self.request.new_ids

    @property
    def counts(self) -> tuple[int, int, int, list[int]]:
        return counted(self.request.stats)

    @property
    def cached(self) -> int:
        return self.request.stats.cached_tokens


def cold(models: Models, prompt: Sequence[int], params: SamplingParams) -> Done:
    return run(Engine(models.target, models.draft, exact=True, prefill_chunk=48), prompt, params)


def warm_engine(models: Models, **more: object) -> Engine:
    return Engine(models.target, models.draft, exact=True, prefill_chunk=48, prefix_rows=PLENTY, **more)  # type: ignore[arg-type]


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Done:
    request, context = engine.submit(prompt, params), None
    while not request.finished:
        engine.step()
        context = request.context or context
    return Done(request, context.rows(0, context.length) if context is not None else torch.empty(0))


def counted(stats: DecodeStats) -> tuple[int, int, int, list[int]]:
    return stats.rounds, stats.drafted, stats.accepted, stats.accepted_by_slot


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, replace(SAMPLED, verifier="token")], ids=["greedy", "block", "token"]
)
def test_warm_tokens_and_acceptance_are_the_cold_ones(models: Models, params: SamplingParams) -> None:
    """In exact mode not about the same: the same tokens in the same rounds, slot by slot."""
    prompts = [[*SYSTEM, *question] for question in ([1, 2, 3], [1, 2], [9] * 40)]
    engine = warm_engine(models)
    warm = [run(engine, prompt, params) for prompt in prompts]
    alone = [cold(models, prompt, params) for prompt in prompts]
    assert [d.answer for d in warm] == [d.answer for d in alone]
    assert [d.counts for d in warm] == [d.counts for d in alone]
    assert all(torch.equal(w.context, a.context) for w, a in zip(warm, alone, strict=True))
    assert [d.cached for d in warm] == [0, 96, 96]
    assert engine.stats.accepted > 0 or params.greedy


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last(models: Models) -> None:
    """Context rows of an answer are made in rounds, a few at a time; those of a prompt by the chunk."""
    engine, prompt = warm_engine(models), list(SYSTEM)
    for turn, params in enumerate([GREEDY, SAMPLED, GREEDY, SAMPLED]):
        params = replace(params, max_new_tokens=40)
        warm, alone = run(engine, prompt, params), cold(models, prompt, params)
        assert warm.answer == alone.answer
        assert warm.counts == alone.counts
        assert torch.equal(warm.context, alone.context)
        if turn:
            assert warm.cached > len(prompt) - 2 * BLOCK, "all but the question and the last round"
        prompt += [*warm.answer, 5, 6, turn]


def test_requests_that_come_together_with_one_prefix_run_it_once(models: Models) -> None:
    engine = warm_engine(models)
    requests = [engine.submit([*SYSTEM, i], GREEDY) for i in range(5)]
    while not engine.idle:
        engine.step()
    assert [r.stats.cached_tokens for r in requests] == [0] + [96] * 4
    assert [r.new_ids for r in requests] == [cold(models, r.prompt_ids, GREEDY).answer for r in requests]
    assert engine.prefix is not None
    assert (engine.prefix.queried, engine.prefix.hit) == (5 * 102, 4 * 96)


def test_preemption_cancelling_and_eviction_change_no_token(models: Models) -> None:
    """Rows for two and a half: somebody steps back, one is cancelled, and cached blocks make way for all of them."""
    allowed, jobs = 260, [([*SYSTEM, i], replace((GREEDY, SAMPLED)[i % 2], max_new_tokens=48)) for i in range(5)]
    engine = warm_engine(models, capacity=Capacity(rows=allowed))
    assert engine.prefix is not None
    requests, steps, held = [engine.submit(*jobs[0])], 0, set()
    while not engine.idle or len(requests) < len(jobs):
        if engine.idle:
            requests += [engine.submit(*job) for job in jobs[1:]]
        engine.step()
        held.add(engine.prefix.rows)
        assert engine.rows + engine.prefix.rows <= allowed
        steps += len(requests) > 1
        if steps == 20:
            engine.cancel(requests[1])
    assert sum(r.preemptions for r in requests) > 0
    assert engine.prefix.hit > 0
    assert 0 in held
    for request, job in zip(requests, jobs, strict=True):
        if request.finish_reason != "cancelled":
            alone = cold(models, *job)
            assert request.new_ids == alone.answer
            assert counted(request.stats) == alone.counts


def test_pasted_rows_are_the_bits_that_running_the_tokens_gives(models: Models) -> None:
    target, ids = models.target, torch.tensor([*SYSTEM, *SYSTEM, *SYSTEM, 7])  # over a chunk of keys
    handles = [target.open(), target.open()]
    target.forward(RaggedRows(handles[:1], (len(ids) - 1,), ids[:-1]))
    target.commit(handles[0], len(ids) - 1)
    for start, count in ((0, 32), (32, 221), (253, 49)):
        target.paste_rows(handles[1], target.copy_rows(handles[0], start, count))
    assert target.length(handles[1]) == len(ids) - 2
    more = [RaggedRows((handle,), (2,), ids[-2:]) for handle in handles]
    target.commit(handles[0], 0)
    target.close(handles[0])
    again = target.open()
    target.forward(RaggedRows((again,), (len(ids) - 2,), ids[:-2]))
    target.commit(again, len(ids) - 2)
    cold_rows, warm_rows = target.forward(replace(more[0], sequences=(again,))), target.forward(more[1])
    assert torch.equal(cold_rows.logits, warm_rows.logits)
    assert torch.equal(cold_rows.taps, warm_rows.taps)
    for handle in (again, handles[1]):
        target.close(handle)


def test_a_context_row_has_the_same_bits_in_any_tile(models: Models) -> None:
    pair = Pair(models.target, models.draft, FullBlock(), isolate=True)
    taps = torch.randn(40, models.draft.config.context_width, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(300, 340)
    whole = pair.context_rows(taps, positions)
    for first, count in product(range(TILE), range(1, 2 * TILE)):
        part = pair.context_rows(taps[first : first + count], positions[first : first + count])
        assert torch.equal(part, whole[:, first : first + count])


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning(models: Models) -> None:
    engine = Engine(models.target, models.draft, prefix_rows=4 * BLOCK)
    first, second = [1] * 70, [2] * 70

    def cached(prompt: list[int]) -> int:
        return run(engine, prompt, SamplingParams(1)).cached

    assert [cached(first), cached(second), cached(first)] == [0, 0, 64]
    assert engine.prefix is not None
    assert engine.prefix.rows == 4 * BLOCK
    assert cached([3] * 40) == 0, "takes the place of the second prompt's end"
    assert cached(first) == 64
    assert cached(second) == 32


def test_prefixes_are_shared_only_under_one_salt(models: Models) -> None:
    engine = warm_engine(models)
    salts = ["", "a", "b", "a", "", "b"]
    done = [run(engine, SYSTEM, replace(GREEDY, cache_salt=salt)) for salt in salts]
    assert [one.cached for one in done] == [0, 0, 0, 96, 96, 96]
    assert len({tuple(one.answer) for one in done}) == 1


def test_a_prompt_longer_than_the_cache_keeps_its_beginning(models: Models) -> None:
    engine = Engine(models.target, models.draft, prefix_rows=2 * BLOCK)
    assert [run(engine, SYSTEM, SamplingParams(1)).cached for _ in range(2)] == [0, 64]


def test_a_failed_step_leaves_no_rows_behind(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm_engine(models)
    request = engine.submit(SYSTEM, GREEDY)
    engine.step()  # 48 of 101 rows

    def fail(rows: RaggedRows) -> None:
        raise RuntimeError

    monkeypatch.setattr(models.target, "forward", fail)
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.prefix is not None
    engine.cancel(request)
    assert engine.prefix.rows == 0


class CopyingToy(ToyTarget):
    """Rows of a toy are its tokens, so a wrong prefix shows as a wrong law."""

    def copy_rows(self, sequence: int, start: int, count: int) -> State:
        return (torch.tensor(self._committed[sequence][start : start + count]),)

    def paste_rows(self, sequence: int, state: State) -> None:
        self._committed[sequence] += state[0].tolist()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_output_after_a_cached_prefix_follows_the_target(verifier: str) -> None:
    """Chi-square of the first three tokens of 600 requests that found their prompt in the cache."""
    vocab, number = 3, 600
    target = CopyingToy(vocab_size=vocab, max_positions=96, seed=2, sharpness=1.5)
    prompt = [i % vocab for i in range(BLOCK + 1)]
    engine = Engine(target, toy_draft(target, block_size=2), prefill_chunk=400, prefix_rows=3 * BLOCK)
    params = SamplingParams(3, temperature=1.2, verifier=verifier)  # type: ignore[arg-type]
    run(engine, prompt, params)
    seen = torch.zeros([vocab] * 3, dtype=torch.float64)
    requests = [engine.submit(prompt, replace(params, seed=seed)) for seed in range(number)]
    while not engine.idle:
        engine.step()
    for request in requests:
        assert request.stats.cached_tokens == BLOCK
        seen[tuple(request.new_ids)] += 1
    law = torch.zeros_like(seen)
    for path in product(range(vocab), repeat=3):
        hidden, _ = target.run(torch.tensor([*prompt, *path[:2]]))
        rows = distribution(target.unembed(hidden[-3:]), [params] * 3)
        law[path] = number * rows[range(3), path].prod()
    assert p_value(seen, law) > 1e-3


def test_a_target_whose_state_cannot_be_copied_says_so() -> None:
    with pytest.raises(BadInput, match="no prefix reuse with a ToyTarget"):
        Engine(ToyTarget(), prefix_rows=PLENTY)


def test_a_cache_smaller_than_a_block_is_refused(models: Models) -> None:
    with pytest.raises(BadInput, match="a block alone has 32"):
        Engine(models.target, prefix_rows=31)
