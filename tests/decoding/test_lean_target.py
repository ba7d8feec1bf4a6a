"""The engine over the lean Llama forward: the same tokens with and without a draft, alone and together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k3dspark.decoding import CostAware, Engine, FixedLength, FullBlock, SamplingParams, Scheduler, StepCosts, Threshold
from k3dspark.decoding.costs import measure
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft
from k3dspark.target.loading import open_target
from k3dspark.target.protocol import Target
from tiny_models import write_draft, write_target
from toy_models import scripted

SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "full": FullBlock,
    "fixed": lambda: FixedLength(3),
    "threshold": lambda: Threshold(0.3),
    "cost, early stop": lambda: CostAware(StepCosts.synthetic(1.0, 0.05, 1), "early_stop"),
    "cost, capacity": lambda: CostAware(StepCosts.synthetic(1.0, 0.05, 8, step=8, draft=0.1), "capacity"),
}
PROMPTS = [[256, 10, 20, 30], list(range(60, 90)), [256]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = write_target(tmp_path_factory.mktemp("target"))
    return open_target(directory, dtype="float32", tap_layer_ids=(0, 2))


@pytest.fixture(scope="module")
def random_draft(target: Target, tmp_path_factory: pytest.TempPathFactory) -> K3DSparkModel:
    directory = write_draft(tmp_path_factory.mktemp("draft"))
    ids = torch.arange(target.vocab_size)
    weight = target.embed(ids)
    return load_draft(directory, target_embed=weight, target_lm_head=weight)


def plain(target: Target, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    return Engine(target, prefill_chunk=7).generate(prompt, params).token_ids


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_are_those_of_plain_decoding(target: Target, random_draft: K3DSparkModel, scheduler: str) -> None:
    for prompt in PROMPTS:
        answer = plain(target, prompt, SamplingParams(24))
        partly = scripted(target, [*prompt, *answer], lambda position: position % 4 == 0)
        for draft in (random_draft, partly):
            engine = Engine(target, draft, SCHEDULERS[scheduler](), prefill_chunk=11)
            assert engine.generate(prompt, SamplingParams(24)).token_ids == answer
        assert engine.stats.accepted > 0


def test_requests_together_give_what_each_gives_alone(target: Target, random_draft: K3DSparkModel) -> None:
    jobs = [(p, SamplingParams(12, temperature=t, seed=3)) for p, t in zip(PROMPTS, (1.0, 0.0, 0.8), strict=True)]
    alone = [Engine(target, random_draft, exact=True).generate(*job).token_ids for job in jobs]
    engine = Engine(target, random_draft, exact=True)
    requests = []
    for job in jobs:
        requests.append(engine.submit(*job))
        engine.step()
    while not engine.idle:
        engine.step()
    assert [tuple(r.new_ids) for r in requests] == alone


@pytest.mark.parametrize(("exact", "sizes"), [(True, {1}), (False, {1, 2, 3})])
def test_exact_drafts_for_each_request_alone(
    target: Target, random_draft: K3DSparkModel, monkeypatch: pytest.MonkeyPatch, exact: bool, sizes: set[int]
) -> None:
    """Kernels may give other last bits for other row counts, and sampling turns a bit into a token."""
    seen: list[int] = []
    block_hidden, context_rows = random_draft.block_hidden, random_draft.context_rows
    positions_seen: list[bool] = []

    def watch_block(caches, anchor_ids, positions):  # type: ignore[no-untyped-def]
        seen.append(len(caches))
        return block_hidden(caches, anchor_ids, positions)

    def watch_rows(taps, positions):  # type: ignore[no-untyped-def]
        # Rows of one sequence are consecutive.
        positions_seen.append(bool((positions.diff() == 1).all()))
        return context_rows(taps, positions)

    monkeypatch.setattr(random_draft, "block_hidden", watch_block)
    monkeypatch.setattr(random_draft, "context_rows", watch_rows)
    engine = Engine(target, random_draft, exact=exact)
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(9))
        engine.step()
    while not engine.idle:
        engine.step()
    assert set(seen) == sizes
    assert all(positions_seen) == exact


def test_measured_costs_cover_every_length_and_leave_nothing_open(target: Target, random_draft: K3DSparkModel) -> None:
    costs = measure(target, random_draft, requests=2, context=20, repeats=2)
    assert {n for n, _ in costs.verify} == {*range(1, 9), 16}
    assert [n for n, _ in costs.draft] == [1, 2]
    assert all(seconds > 0 for _, seconds in (*costs.verify, *costs.draft))
    assert not target._sequences  # type: ignore[attr-defined]


def test_draft_gradients_are_never_built(target: Target, random_draft: K3DSparkModel) -> None:
    engine = Engine(target, random_draft.requires_grad_(True))
    request = engine.submit([256, 1], SamplingParams(9))
    engine.step()
    engine.step()
    assert request.context is not None
    assert not request.context.chunks(0)[0].requires_grad
    random_draft.requires_grad_(False)
