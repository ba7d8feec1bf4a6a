"""A scheduler that reports what another one decides, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3dspark.decoding import Load, Outcome, Scheduler
from k3dspark.decoding.schedule import Confident, Survival, acceptance


@dataclass(frozen=True)
class Watched:
    """One round as the scheduler saw it; rows of `survival` [B, K] belong to `outcome.load.requests`."""

    outcome: Outcome
    survival: Survival


class WatchedScheduler:
    """Passes everything on to `inner`; `take` gives the round since the last call, if there was one."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self._survival: Survival | None = None
        self._round: Watched | None = None

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        return self.inner.wants_draft(load)

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        # Before anything is learned from this round: it is what the lengths were chosen by.
        if isinstance(self.inner, Confident):
            steps = self.inner.acceptance(confidence, load)
        else:
            steps = acceptance(confidence.detach().to("cpu", torch.float64).numpy())
        self._survival = steps.cumprod(1)
        return self.inner.lengths(confidence, load)

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)
        assert self._survival is not None
        self._round = Watched(outcome, self._survival)

    def take(self) -> Watched | None:
        watched, self._round = self._round, None
        return watched
