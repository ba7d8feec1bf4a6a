"""A generator in a few lines whose every logit is known: a law of tokens given the tokens before, without any model.

It has what real sides have (rounding, faults, conventions), so that each reading of an answer can be tested alone. The
planted faults around a real engine are in `planted.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from k3dspark.acceptance.asking import Answer, Codec, Question, Scores, Source

VOCABULARY = 40
END = 0
Law = Callable[[Sequence[int]], list[float]]


def law(history: Sequence[int], sharpness: float = 3.0) -> list[float]:
    """Logits of the next token: random, but the same for the same last five tokens. The end is never likely."""
    return list(_logits(tuple(history[-5:]), sharpness))


@cache
def _logits(last: tuple[int, ...], sharpness: float) -> tuple[float, ...]:
    draw = random.Random(str(last))
    return (-20.0, *(draw.gauss(0, sharpness) for _ in range(VOCABULARY - 1)))


@dataclass
class Scripted:
    """Greedy or sampled decoding of a law. `wobble` is the size of its rounding; a seed of None draws it anew."""

    law: Law = law
    wobble: float = 0.0
    wobble_seed: int | None = 0
    edit: Callable[[Answer, Question], Answer] = lambda answer, _: answer
    silent: bool = False  # no log-probabilities
    kind: str = "scripted"
    name: str = "scripted"
    context: int | None = 4096
    has_cache: bool | None = False
    chats: bool = True
    template: Sequence[int] = (7, 7)
    tells_prompt: bool = True
    asked: list[Question] = field(default_factory=list)
    slip: float = 0.0  # a temperature that the client did not ask for

    def codec(self) -> Codec | None:
        return None

    def close(self) -> None:
        pass

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        self.asked += questions
        return [self._one(question) for question in questions]

    def prompt(self, question: Question) -> tuple[int, ...]:
        if question.token_ids is not None:
            return question.token_ids
        text = question.text or "".join(m["content"] for m in question.messages or ())
        ids = tuple(1 + ord(char) % (VOCABULARY - 1) for char in text)
        return (*self.template, *ids, *self.template) if question.messages else ids

    def _one(self, question: Question) -> Answer:
        history = list(self.prompt(question))
        start, scores = len(history), []
        noise = random.Random(self.wobble_seed)
        draw = random.Random(question.sampling.seed)
        temperature = question.sampling.temperature or self.slip
        finish = "length"
        for _ in range(question.max_tokens):
            logits = [value + noise.gauss(0, self.wobble) for value in self.law(history)]
            peak = max(logits)
            total = math.log(sum(math.exp(value - peak) for value in logits)) + peak
            token = max(range(VOCABULARY), key=logits.__getitem__)
            if temperature:
                weights = [math.exp((value - peak) / temperature) for value in logits]
                token = draw.choices(range(VOCABULARY), weights)[0]
            best = sorted(range(VOCABULARY), key=lambda t: -logits[t])[: question.top or 0]
            history.append(token)
            scores.append(Scores(logits[token] - total, tuple((t, logits[t] - total) for t in best)))
            text = as_text(history[start:])
            if (token == END and not question.ignore_end) or any(stop in text for stop in question.stop):
                finish = "stop"
                break
        text = as_text(history[start:])
        cuts = [at for stop in question.stop if (at := text.find(stop)) >= 0]
        answer = Answer(
            token_ids=tuple(history[start:]),
            text=text[: min(cuts)] if cuts else text,
            finish=finish,
            source=Source.IDS,
            scores=() if self.silent or question.top is None else tuple(scores),
            prompt_tokens=start,
            prompt_ids=tuple(history[:start]) if self.tells_prompt else None,
        )
        return self.edit(answer, question)


def as_text(ids: Sequence[int]) -> str:
    return "".join(f"{token:02}" for token in ids if token != END)


def swap(answer: Answer, at: int, token: int | None = None) -> Answer:
    """The answer with one token replaced, its log-probabilities left as they were."""
    wrong = (answer.token_ids[at] + 1) % VOCABULARY or 1 if token is None else token
    known = dict(answer.scores[at].best) if answer.scores else {}
    scores = list(answer.scores)
    if scores:
        scores[at] = replace(scores[at], chosen=known.get(wrong, -30.0))
    ids = (*answer.token_ids[:at], wrong, *answer.token_ids[at + 1 :])
    return replace(answer, token_ids=ids, text=as_text(ids), scores=tuple(scores))
