"""Confidence fitted to what is really accepted: rounds recorded, sequential temperature scaling, figures (spec §E).

A draft's confidence is trained on the acceptance of token-level sampling at temperature 1. Under any other setting, or
greedily, σ(g) is not the chance that a token stands; one temperature per slot, fitted for that setting, mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.decoding.engine import Engine
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.schedule import FullBlock, Load, Outcome, acceptance
from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.protocol import Target
from k3dspark.training.reliability import ece

Floats = NDArray[np.float64]

GRID = tuple(float(t) for t in np.geomspace(1 / 8, 8, 65))


@dataclass(frozen=True)
class Rounds:
    """Whole blocks that were verified: confidence logits [N, K], tokens accepted [N], index of the prompt [N].

    Every round has a label for every slot ("at least k were accepted"), because no block was cut short.
    """

    logits: Floats
    accepted: NDArray[np.int64]
    prompt: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def slots(self) -> int:
        return int(self.logits.shape[1])

    def of(self, prompts: Sequence[int]) -> Rounds:
        """The rounds of these prompts."""
        chosen = np.isin(self.prompt, list(prompts))
        return Rounds(self.logits[chosen], self.accepted[chosen], self.prompt[chosen])

    def survived(self, slot: int) -> NDArray[np.bool_]:
        """Whether the token of a slot (from 0) and all before it were accepted, [N]."""
        return self.accepted > slot


class Recorder(FullBlock):
    """Verifies every block whole, and keeps the confidence and the outcome of each by request."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[tuple[list[float], int]]] = {}
        self._logits: list[list[float]] = []

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        self._logits = confidence.tolist()
        return load.limits

    def observe(self, outcome: Outcome) -> None:
        rounds = zip(outcome.load.requests, self._logits, outcome.verified, outcome.accepted, strict=True)
        for request, logits, verified, accepted in rounds:
            if logits and verified == len(logits):  # the end of an answer leaves no room for a whole block
                self.rounds.setdefault(request, []).append((logits, accepted))


def record(
    target: Target,
    draft: K3DSparkModel,
    prompts: Sequence[Sequence[int]],
    params: Callable[[int], SamplingParams],
    batch: int = 8,
    on_prompt: Callable[[int, int], None] | None = None,
) -> Rounds:
    """Answer all prompts (token ids) in full blocks, `batch` at once; `params(i)` are those of prompt i.

    `on_prompt(answers done, rounds so far)` is called as answers end.
    """
    recorder = Recorder()
    engine = Engine(target, draft, recorder)
    prompt_of: dict[int, int] = {}
    waiting = list(enumerate(prompts))[::-1]
    done = 0
    while waiting or not engine.idle:
        while waiting and len(prompt_of) - done < batch:
            index, ids = waiting.pop()
            prompt_of[engine.submit(ids, params(index)).id] = index
        ended = [p.request for p in engine.step() if p.request.finished]
        done += len(ended)
        if ended and on_prompt is not None:
            on_prompt(done, sum(len(rounds) for rounds in recorder.rounds.values()))
    rows = [(logits, n, prompt_of[r]) for r, rounds in recorder.rounds.items() for logits, n in rounds]
    return Rounds(
        np.array([logits for logits, _, _ in rows], dtype=np.float64).reshape(len(rows), draft.block_size),
        np.array([accepted for _, accepted, _ in rows], dtype=np.int64),
        np.array([prompt for _, _, prompt in rows], dtype=np.int64),
    )


def fit(rounds: Rounds, grid: Sequence[float] = GRID) -> tuple[float, ...]:
    """Sequential temperature scaling (DSpark): slot by slot, the temperature with the least ECE of the survival.

    Earlier slots are frozen: slot k's temperature makes the product of σ(g_i / T_i) up to k agree with how often at
    least k tokens were accepted. Of equally good temperatures, the one nearest to 1.
    """
    order = sorted(grid, key=lambda t: abs(np.log(t)))
    before = np.ones(len(rounds))
    temperatures = []
    for slot in range(rounds.slots):
        survival = {t: before * acceptance(rounds.logits[:, slot], t) for t in order}
        best = min(order, key=lambda t: ece(survival[t], rounds.survived(slot)))
        temperatures.append(best)
        before = survival[best]
    return tuple(temperatures)
