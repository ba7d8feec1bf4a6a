"""Greedy decoding with a draft gives the tokens of transformers' own `generate`, whatever state the target keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import pytest
import torch
import transformers
from torch import Tensor

from k3dspark.decoding import (
    CostAware,
    Engine,
    FixedLength,
    FullBlock,
    Load,
    Outcome,
    SamplingParams,
    Scheduler,
    StepCosts,
    Threshold,
)
from k3dspark.model.cache import LatentCache
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling, Proposal
from k3dspark.target.transformers_target import TransformersTarget
from target.families import FAMILIES
from target.tiny import make_model, tokens
from toy_models import toy_draft

K, PROMPTS, NEW = 7, 20, 12
TAPS = (0, 1)
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "full": FullBlock,
    "fixed": lambda: FixedLength(4),
    "threshold": lambda: Threshold(0.3),
    "cost, early stop": lambda: CostAware(StepCosts.synthetic(1.0, 0.01, 1), "early_stop"),
    "cost, capacity": lambda: CostAware(StepCosts.synthetic(1.0, 0.01, 8, step=8, draft=0.1), "capacity"),
}
CONSTANT = ("RWKV", "RecurrentGemma")  # with random weights they answer the same whatever the prompt
EVERY_SUITE = ("Llama", "Qwen3", "DeepSeek-V3", "Kimi-Linear", "Gemma 3", "Falcon-H1")


class NoisyOracle(K3DSparkModel):
    """A real draft network whose tokens are replaced by the target's own continuation, with one wrong slot or none.

    Which slot is wrong changes from round to round, so a round accepts anything from 0 to K tokens. The slots after
    the wrong one are right again: a rollback or a verifier that goes by them is found out.
    """

    texts: Sequence[Sequence[int]]  # prompt and continuation of every request, in the order of their prefill
    opened: list[LatentCache]

    def new_cache(self, block_tokens: int = 4096) -> LatentCache:
        self.opened.append(super().new_cache(block_tokens))
        return self.opened[-1]

    def propose(
        self,
        caches: Sequence[LatentCache],
        anchor_ids: Tensor,
        positions: Tensor,
        sampling: DraftSampling | None = None,
    ) -> Proposal:
        own = super().propose(caches, anchor_ids, positions, sampling)
        guesses = []
        for cache, position in zip(caches, positions.tolist(), strict=True):
            request = next(i for i, opened in enumerate(self.opened) if opened is cache)
            wrong = (3 * request + position) % (self.block_size + 1)
            guess = [*self.texts[request][position + 1 :], *[0] * self.block_size][: self.block_size]
            guesses.append([(t + (k == wrong)) % self.config.vocab_size for k, t in enumerate(guess)])
        return Proposal(torch.tensor(guesses), own.confidence + 2.5)


class Watched:
    """A scheduler that notes what became of its choices."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.accepted: set[int] = set()

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        return self.scheduler.wants_draft(load)

    def lengths(self, confidence: Tensor, load: Load) -> tuple[int, ...]:
        return self.scheduler.lengths(confidence, load)

    def observe(self, outcome: Outcome) -> None:
        self.accepted |= set(outcome.accepted)
        self.scheduler.observe(outcome)


@dataclass(frozen=True)
class Family:
    target: TransformersTarget
    prompts: list[list[int]]
    answers: list[list[int]]  # of transformers


def open_family(name: str) -> Family:
    config, rollback = FAMILIES[name]
    model = make_model(config())
    target = TransformersTarget(model, TAPS)
    assert target.rollback is rollback
    prompts = [tokens((3, 9, 14)[i // 7], seed=i).tolist() for i in range(PROMPTS)]
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW)
    model.generation_config.eos_token_id = None  # of `settings`, None would mean this one
    answers: list[list[int]] = []
    for length, same in groupby(prompts, len):  # batches of one length need no padding
        ids = torch.tensor(list(same))
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        answers += output[:, length:].tolist()
    assert len({tuple(answer) for answer in answers}) > PROMPTS // 2, "the answers must depend on the prompts"
    return Family(target, prompts, answers)


def decode(family: Family, scheduler: Scheduler) -> tuple[list[list[int]], set[int]]:
    """Tokens of all prompts, decoded together, and the numbers of draft tokens that rounds accepted."""
    draft = toy_draft(family.target, kind=NoisyOracle)
    assert isinstance(draft, NoisyOracle)
    draft.texts = [p + a for p, a in zip(family.prompts, family.answers, strict=True)]
    draft.opened = []
    watched = Watched(scheduler)
    engine = Engine(family.target, draft, watched, prefill_chunk=8)
    requests = [engine.submit(prompt, SamplingParams(NEW)) for prompt in family.prompts]
    while not engine.idle:
        engine.step()
    return [request.new_ids for request in requests], watched.accepted


def params(names: Sequence[str], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(name, marks=marks) for name in names]


@pytest.fixture(
    scope="module",
    params=[
        *params(EVERY_SUITE),
        *params([name for name in FAMILIES if name not in EVERY_SUITE + CONSTANT], pytest.mark.integration),
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    return open_family(request.param)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_are_those_of_transformers_generate(family: Family, scheduler: str) -> None:
    generated, accepted = decode(family, SCHEDULERS[scheduler]())
    assert generated == family.answers
    assert accepted >= set(range(4 + 1 if scheduler == "fixed" else K + 1))
