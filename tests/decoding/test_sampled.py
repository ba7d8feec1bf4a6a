"""Sampled decoding end to end: real draft, real pipeline, many rounds, compared with the target's exact law."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from k3dspark.decoding import Engine, FinishReason, Request, SamplingParams, Threshold
from k3dspark.decoding.sampling import History, adjust, distribution
from k3dspark.decoding.streams import Stream, coarse_uniforms, uniforms
from k3dspark.decoding.verify import Draws, verify_block, verify_token
from k3dspark.errors import EngineFault
from k3dspark.model.proposal import DraftSampling
from k3dspark.target.transformers_target import TransformersTarget
from target.tiny import llama, make_model, reference, run
from toy_models import ToyTarget, oracle, toy_draft

V, K, ROUNDS = 6, 3, 200_000
PROMPT, ANCHOR = [3, 1, 4], 5
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {2: 1.0}}
VERIFIERS = {"block": verify_block, "token": verify_token}


@cache
def tiny_llama() -> tuple[TransformersTarget, dict[tuple[int, ...], Tensor], Tensor]:
    """A random Llama in fp32; its logits [K+1, V] after every drafted path, each rolled back; taps of the prompt."""
    target = TransformersTarget(make_model(llama(vocab_size=V, initializer_range=0.3)), (0, 1))
    sequence = target.open()
    taps = run(target, sequence, torch.tensor(PROMPT)).taps
    logits = {
        path: run(target, sequence, torch.tensor([ANCHOR, *path]), keep=0).logits
        for path in product(range(V), repeat=K)
    }
    return target, logits, taps


class Rounds:
    """One round of a real draft and a real target at one context, repeated with other random numbers."""

    def __init__(self, params: SamplingParams, candidates: int | None = None) -> None:
        self.target, logits, self.taps = tiny_llama()
        self.draft = toy_draft(self.target, block_size=K)
        self.params, self.candidates = params, candidates
        # Target rows of every path: [V^K, K+1, V].
        self.rows = torch.stack([self.probs(rows, path) for path, rows in logits.items()])

    def probs(self, logits: Tensor, drafted: tuple[int, ...]) -> Tensor:
        logits = adjust(logits, torch.tensor(drafted, dtype=torch.long), History(PROMPT, [ANCHOR]), self.params)
        return distribution(logits, [self.params] * len(logits))

    def play(self, verifier: str, numbers: Callable[[Stream, int], Tensor]) -> Tensor:
        """Counts [V, V] of the first two output tokens over ROUNDS rounds."""
        draft, context = self.draft, self.draft.new_cache()
        context.append(draft.context_rows(self.taps, torch.arange(len(PROMPT))))
        anchors = torch.full((ROUNDS,), ANCHOR)
        hidden = draft.block_hidden([context], anchors[:1], torch.tensor([len(PROMPT)])).expand(ROUNDS, -1, -1)
        warmth = torch.full((ROUNDS,), self.params.temperature, dtype=torch.float64)
        proposal = draft.sample(hidden, anchors, DraftSampling(warmth, numbers(Stream.DRAFT, K), self.candidates))
        index = (proposal.tokens * V ** torch.arange(K - 1, -1, -1)).sum(1)
        draws = Draws(numbers(Stream.ACCEPT, K), numbers(Stream.FINAL, 1)[:, 0])
        rows = self.rows[index].flatten(0, 1)
        accepted = VERIFIERS[verifier](rows, proposal, torch.full((ROUNDS,), K), draws)
        output = torch.cat([proposal.tokens, proposal.tokens[:, :1]], 1)
        output.scatter_(1, accepted.count[:, None], accepted.next_token[:, None])
        first, second = output[:, 0], output[:, 1]
        # A round of one token leaves the second to a later one, which is the target's.
        later = torch.multinomial(self.law()[1], ROUNDS, True, generator=torch.Generator().manual_seed(0))
        second = torch.where(accepted.count > 0, second, later[first, torch.arange(ROUNDS)])
        return torch.bincount(first * V + second, minlength=V * V).view(V, V)

    def law(self) -> tuple[Tensor, Tensor]:
        """The target's distribution of the first token [V], and of the second after each first [V, V].

        From the whole text in fp64 and without a cache: no rollback, no fp32 and no draft had a part in it.
        """
        model = copy.deepcopy(self.target.model).double()
        rows = []
        for v in range(V):
            logits, _ = reference(model, torch.tensor([*PROMPT, ANCHOR, v]), ())
            rows.append(self.probs(logits[-2:], (v,)))
        return rows[0][0], torch.stack([row[1] for row in rows])

    def expected(self) -> Tensor:
        first, second = self.law()
        return ROUNDS * first[:, None] * second


def own_streams(stream: Stream, slots: int) -> Tensor:
    numbers = coarse_uniforms if stream is Stream.DRAFT else uniforms
    return numbers(range(ROUNDS), [len(PROMPT)] * ROUNDS, stream, slots)


def one_stream(stream: Stream, slots: int) -> Tensor:
    return own_streams(Stream.DRAFT, slots)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square test over the cells that can occur."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_two_tokens_of_many_rounds_follow_the_target(
    temperature: float, top_p: float, penalties: dict[str, Any]
) -> None:
    rounds = Rounds(SamplingParams(temperature=temperature, top_p=top_p, **penalties))
    for verifier in VERIFIERS:
        assert p_value(rounds.play(verifier, own_streams), rounds.expected()) > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_truncated_draft_follows_the_target_too(verifier: str) -> None:
    rounds = Rounds(SamplingParams(temperature=1.0), candidates=2)
    assert p_value(rounds.play(verifier, own_streams), rounds.expected()) > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_one_stream_for_draft_and_acceptance_would_be_noticed(verifier: str) -> None:
    """The same test fails when the three streams are one (hazard I-28)."""
    rounds = Rounds(SamplingParams(temperature=1.0))
    assert p_value(rounds.play(verifier, one_stream), rounds.expected()) < 1e-6


def run_all(engine: Engine, jobs: list[tuple[list[int], SamplingParams]], stagger: int = 0) -> list[Request]:
    requests = []
    for prompt, params in jobs:
        requests.append(engine.submit(prompt, params))
        for _ in range(stagger):
            engine.step()
    while not engine.idle:
        engine.step()
    return requests


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_engine_output_follows_the_target(verifier: str, with_draft: bool) -> None:
    """Through `submit` and `step`: 600 requests, the law of the first three tokens."""
    vocab, count = 3, 600
    target = ToyTarget(vocab_size=vocab, seed=2, sharpness=1.5)
    engine = Engine(target, toy_draft(target, block_size=2) if with_draft else None, prefill_chunk=200)
    params = SamplingParams(3, temperature=1.2, presence_penalty=0.5, verifier=verifier)  # type: ignore[arg-type]
    requests = run_all(engine, [([1, 2], replace(params, seed=seed)) for seed in range(count)])
    seen = torch.zeros([vocab] * 3, dtype=torch.float64)
    for request in requests:
        seen[tuple(request.new_ids)] += 1
    law = torch.zeros_like(seen)
    for path in product(range(vocab), repeat=3):
        chance = 1.0
        for i in range(3):
            hidden, _ = target.run(torch.tensor([1, 2, *path[:i]]))
            logits = target.unembed(hidden[-1:])
            logits = adjust(logits, torch.empty(0, dtype=torch.long), History([1, 2], path[:i]), params)
            chance *= float(distribution(logits, [params])[0, path[i]])
        law[path] = chance * count
    assert p_value(seen, law) > 1e-3
    if with_draft:
        assert engine.stats.accepted > 0


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_same_seed_gives_the_same_tokens_alone_and_in_company(verifier: str) -> None:
    target = ToyTarget(seed=7)
    draft = toy_draft(target)
    jobs = [
        ([1, 2, i], SamplingParams(8, temperature=t, seed=i, verifier=verifier, top_p=p))  # type: ignore[arg-type]
        for i, (t, p) in enumerate([(1.0, 1.0), (0.7, 0.9), (0.0, 1.0), (1.5, 0.95)])
    ]
    for scheduler in (None, Threshold(0.3)):
        alone = [list(Engine(target, draft, scheduler, exact=True).generate(*job).token_ids) for job in jobs]
        for stagger in (0, 2):
            together = run_all(Engine(target, draft, scheduler, exact=True), jobs, stagger)
            assert [r.new_ids for r in together] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(jobs)


def test_seeds_differ_and_missing_ones_are_drawn() -> None:
    target = ToyTarget()
    engine = Engine(target)
    hot = SamplingParams(20, temperature=2.0)
    texts = {tuple(engine.generate([1], replace(hot, seed=seed)).token_ids) for seed in (1, 2, 3, None, None)}
    assert len(texts) == 5
    seeds = {engine.submit([1], hot).seed for _ in range(3)}
    assert len(seeds) == 3


def test_greedy_with_penalties_is_plain_greedy_with_penalties() -> None:
    """The history of each verified row includes the drafted tokens before it (hazard I-27)."""
    target = ToyTarget(vocab_size=5, seed=3)
    params = SamplingParams(
        40, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.3, logit_bias={1: 0.5}
    )
    plain = Engine(target).generate([1, 2], params)
    free = target.greedy([1, 2], 40)
    for draft in (toy_draft(target), oracle(target, [1, 2], 40)):
        assert Engine(target, draft).generate([1, 2], params).token_ids == plain.token_ids
    assert list(plain.token_ids) != free


@pytest.mark.parametrize("with_draft", [True, False])
def test_logprobs_are_the_targets_before_any_processing(with_draft: bool) -> None:
    target = ToyTarget()
    draft = oracle(target, [3, 1], 40, lambda n: n % 3 == 0) if with_draft else None
    result = Engine(target, draft).generate([3, 1], SamplingParams(15, logprobs=2, logit_bias={4: 1.0}))
    assert len(result.logprobs) == 15
    hidden, _ = target.run(torch.tensor([3, 1, *result.token_ids]))
    expected = target.unembed(hidden).log_softmax(-1)[1:-1]
    for token, entry, row in zip(result.token_ids, result.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-9)
        assert [t for t, _ in entry.best] == row.topk(2).indices.tolist()
        assert [x for _, x in entry.best] == pytest.approx(row.topk(2).values.tolist(), abs=1e-9)


def test_logprobs_stop_with_the_tokens() -> None:
    target = ToyTarget()
    answer = target.greedy([3, 1], 20)
    params = SamplingParams(20, logprobs=0, stop_token_ids=(answer[5],))
    result = Engine(target, oracle(target, [3, 1], 40)).generate([3, 1], params)
    assert len(result.logprobs) == len(result.token_ids)
    assert result.logprobs[0].best == ()
    assert result.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_target_that_produces_nan_is_a_fault_when_sampling(top_p: float) -> None:
    target = ToyTarget()
    calls = iter(range(100))
    target.poison = lambda logits: logits * float("nan") if next(calls) == 2 else logits
    with pytest.raises(EngineFault, match="target produced NaN"):
        Engine(target, toy_draft(target)).generate([1, 2], SamplingParams(30, temperature=1.0, top_p=top_p))


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    target = ToyTarget()
    draft = toy_draft(target)
    kinds = [(0.0, "block"), (1.0, "block"), (0.0, "token"), (1.0, "token"), (0.7, "block")]
    jobs = [
        ([3, i], SamplingParams(15, temperature=t, verifier=v, seed=i, top_k=4))  # type: ignore[arg-type]
        for i, (t, v) in enumerate(kinds)
    ]
    requests = run_all(Engine(target, draft), jobs, stagger=1)
    assert requests[0].new_ids == target.greedy([3, 0], 15)
    assert requests[2].new_ids == target.greedy([3, 2], 15)
    assert all(len(r.new_ids) == 15 for r in requests)
