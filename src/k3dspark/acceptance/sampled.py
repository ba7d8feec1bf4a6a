"""Sampled answers: are the tokens of both sides draws from one distribution?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k3dspark.acceptance.asking import Answer, Generator, Question, Sampling
from k3dspark.acceptance.inputs import Input
from k3dspark.acceptance.statistics import TwoSample, holm, two_sample

POSITIONS = 4  # a first token comes from the prompt alone; a draft has its say from the second on
PROMPTS = 5
ENDED = -1


@dataclass(frozen=True)
class SampledTest:
    """One prompt, one place in the answer. `adjusted` is p after Holm's correction over all tests of the run."""

    input: str
    position: int
    draws: int  # of each side
    distinct: int  # tokens seen by either
    test: TwoSample
    adjusted: float


def compare_sampled(
    baseline: Generator,
    candidate: Generator,
    inputs: Sequence[Input],
    draws: int,
    sampling: Sampling,
    done: Callable[[], None] = lambda: None,
) -> list[SampledTest]:
    """Draw the first `POSITIONS` tokens `draws` times from both sides, every draw with a seed of its own."""
    seed = sampling.seed or 0
    chosen = list(inputs)[:PROMPTS]
    found = []
    for number, given in enumerate(chosen):
        first = seed + 2 * draws * number
        ours = _draw(baseline, given, draws, sampling, first)
        theirs = _draw(candidate, given, draws, sampling, first + draws)
        for position in range(POSITIONS):
            a, b = (_tokens(answers, position) for answers in (ours, theirs))
            if {*a, *b} != {ENDED}:
                found.append((given.name, position, len({*a, *b}), two_sample(a, b, seed + position)))
        done()
    adjusted = holm([test.p for *_, test in found])
    return [
        SampledTest(name, position, draws, distinct, test, p)
        for (name, position, distinct, test), p in zip(found, adjusted, strict=True)
    ]


def _draw(side: Generator, given: Input, draws: int, sampling: Sampling, seed: int) -> list[Answer]:
    question: Question = replace(
        given.question, max_tokens=POSITIONS, stop=(), top=1
    )  # names of tokens, where a server has no ids
    return side.ask([replace(question, sampling=replace(sampling, seed=seed + n)) for n in range(draws)])


def _tokens(answers: Sequence[Answer], position: int) -> list[int]:
    return [answer.token_ids[position] if position < len(answer.token_ids) else ENDED for answer in answers]
