"""How many draft tokens of each request one target pass verifies (spec E).

Losslessness asks that the event "slot k of a request is verified" depends on nothing drawn at slot k or later of that
request, nor on this round's target results. Column k of the survival obeys that: it is computed from the hidden state
and the tokens before slot k. So a rule may look at column k to admit slot k, but at no later column. A global best over
fresh survivals looks ahead, and is biased (spec E.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.decoding.calibration import OnlineCalibration, Scalings
from k3dspark.decoding.costs import StepCosts
from k3dspark.errors import BadInput

Survival = NDArray[np.float64]  # [B, K], non-increasing along a row


@dataclass(frozen=True)
class Load:
    """What a scheduler may know before a round: nothing of this round's draws, nothing of its target results.

    One entry per request: its id, its committed tokens, `limits`, the most draft tokens that its remaining budget and
    context window leave room for (never more than the block has, 0 for a request that is not drafted), and its
    sampling setting (`Setting.key`), by which confidence is calibrated; no settings: confidence is taken as it is.
    """

    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    limits: tuple[int, ...]
    settings: tuple[str, ...] = ()

    def alone(self, index: int) -> Load:
        """The load of one of the requests, as if it ran alone."""
        one = slice(index, index + 1)
        return Load(self.requests[one], self.contexts[one], self.limits[one], self.settings[one])


@dataclass(frozen=True)
class Outcome:
    """What a round brought: draft tokens verified and accepted per request, and the time of its two passes."""

    load: Load
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float


class Scheduler(Protocol):
    """Chooses verify lengths; the methods are called in this order, once a round."""

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        """Which requests are worth a draft this round, judged from past rounds only."""
        ...

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        """Draft tokens to verify per request, 0 … its limit; `confidence` fp32 [B, K] holds logits (spec C)."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished round; takes effect from the next one."""
        ...


class FullBlock:
    """Verify everything that was drafted and fits."""

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        return tuple(limit > 0 for limit in load.limits)

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        return load.limits

    def observe(self, outcome: Outcome) -> None:
        return None


class FixedLength(FullBlock):
    """Verify the same number of tokens every round."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise BadInput(f"the draft length is {length}", "it cannot be negative", "pass 0 or more")
        self.length = length

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        return tuple(min(self.length, limit) > 0 for limit in load.limits)

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        return tuple(min(self.length, limit) for limit in load.limits)


class Confident(FullBlock):
    """What schedulers that read confidence share: its calibration, which learns from finished rounds if it can."""

    def __init__(self, calibration: Scalings | None = None) -> None:
        self.calibration = calibration
        self._logits: Survival | None = None  # of the round under way

    def acceptance(self, confidence: torch.Tensor, load: Load) -> Survival:
        """Probability [B, K] that a slot is accepted if all before it were."""
        logits = confidence.detach().to("cpu", torch.float64).numpy()
        self._logits = logits
        if self.calibration is not None and load.settings and logits.size:
            rows = zip(load.settings, logits, strict=True)
            logits = np.stack([self.calibration.scaling(setting)(row) for setting, row in rows])
        return acceptance(logits)

    def observe(self, outcome: Outcome) -> None:
        if isinstance(self.calibration, OnlineCalibration) and self._logits is not None and outcome.load.settings:
            self.calibration.observe(outcome.load.settings, self._logits, outcome.verified, outcome.accepted)
        self._logits = None


class Threshold(Confident):
    """Verify the leading slots that are likely enough: survival, or each slot's own confidence, at least `least`."""

    def __init__(
        self,
        least: float,
        of: Literal["survival", "confidence"] = "survival",
        calibration: Scalings | None = None,
    ) -> None:
        if not 0.0 <= least <= 1.0:
            raise BadInput(f"the threshold is {least}", "it is a probability", "pass a number from 0 to 1")
        super().__init__(calibration)
        self.least, self.of = least, of

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        step = self.acceptance(confidence, load)
        values = step.cumprod(1) if self.of == "survival" else step
        leading = (values >= self.least).cumprod(1).sum(1)
        return tuple(min(int(n), limit) for n, limit in zip(leading, load.limits, strict=True))


class CostAware(Confident):
    """Verify what raises the expected tokens per second of the whole batch, from measured costs (spec E.2, E.3).

    `early_stop` admits fresh survivals in descending order until one does not pay. `capacity` takes the number of
    admitted tokens from survivals of past rounds, where a best over everything is allowed and a step in the cost curve
    can be crossed, and gives these places to the best fresh survivals; a request that runs alone has nobody to share
    with, and goes by `foresight` instead: its own fresh survival, continued as past rounds say.

    A request whose draft has stopped paying is decoded plainly and probed every `probe_every` rounds. `alone` plans
    for each request as if it were the only one, so that its lengths do not depend on its company: what a sampled
    request needs to give the same tokens in any company.
    """

    REMEMBERED = 1024  # requests that left and are still known
    MARGIN = 0.01  # gains in speed under this are less than the costs are known to

    def __init__(
        self,
        costs: StepCosts,
        form: Literal["early_stop", "capacity"] = "capacity",
        calibration: Scalings | None = None,
        probe_every: int = 16,
        alone: bool = False,
    ) -> None:
        if form not in ("early_stop", "capacity"):
            raise BadInput(f"the form is {form!r}", "known forms are early_stop and capacity", "pass one of them")
        super().__init__(calibration)
        self.costs, self.form, self.probe_every, self.alone = costs, form, probe_every, alone
        self._memory: dict[int, _Memory] = {}

    def wants_draft(self, load: Load) -> tuple[bool, ...]:
        for request in load.requests:
            known = self._recall(request)
            del self._memory[request]
            self._memory[request] = known  # the latest stand at the end
        # Not at once: a request that stepped back for others comes again, and must go on as if it had not.
        for left in list(self._memory)[: max(0, len(self._memory) - len(load.requests) - self.REMEMBERED)]:
            del self._memory[left]
        if not self.alone:
            return self._worth_drafting(load)
        return tuple(self._worth_drafting(load.alone(b))[0] for b in range(len(load.requests)))

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        if self.alone and self.form == "capacity" and self.costs.level(1 + max(load.limits, default=0)):
            return load.limits  # what `foresight` would find, sooner
        fresh = self.acceptance(confidence, load).cumprod(1)
        if not fresh.size:
            return load.limits
        if not self.alone:
            return self._admit(fresh, load)
        return tuple(self._admit(fresh[b : b + 1], load.alone(b))[0] for b in range(len(fresh)))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        rounds = zip(outcome.load.requests, outcome.verified, outcome.accepted, outcome.load.limits, strict=True)
        for request, verified, accepted, limit in rounds:
            if limit > 0:
                self._recall(request).learn(verified, accepted)

    def _worth_drafting(self, load: Load) -> tuple[bool, ...]:
        memory = [self._memory[r] for r in load.requests]
        able = [b for b, limit in enumerate(load.limits) if limit > 0]
        gains = {b: min(memory[b].gain, load.limits[b]) for b in able}
        able.sort(key=lambda b: (-gains[b], b))
        committed = tokens = float(len(load.requests))
        best, worth = committed / self.costs.seconds(0, tokens), 0
        for count, b in enumerate(able, 1):
            committed += gains[b]
            tokens += min(memory[b].width, load.limits[b])
            speed = committed / self.costs.seconds(count, tokens)
            if speed > best:
                best, worth = speed, count
        chosen = set(able[:worth])
        for b in able[worth:]:
            memory[b].skipped += 1
            if memory[b].skipped >= self.probe_every:
                chosen.add(b)
        for b in chosen:
            memory[b].skipped = 0
        return tuple(b in chosen for b in range(len(load.requests)))

    def _admit(self, fresh: Survival, load: Load) -> tuple[int, ...]:
        if self.form == "early_stop":
            return early_stop(fresh, load.limits, self.costs)
        stale = np.stack([self._recall(r).survival(fresh.shape[1]) for r in load.requests])
        for request, limit, row in zip(load.requests, load.limits, fresh, strict=True):
            if limit > 0:
                self._recall(request).remember(row)
        if len(load.requests) == 1:
            return (foresight(fresh[0], stale[0], load.limits[0], self.costs, self.MARGIN),)
        return allocate(fresh, load.limits, best_capacity(stale, load.limits, self.costs))

    def _recall(self, request: int) -> _Memory:
        return self._memory.setdefault(request, _Memory())


class _Memory:
    """Decayed means of one request's past rounds; optimistic where there are none."""

    DECAY = 0.95
    PRIOR_ROUNDS = 4.0
    PRIOR_GAIN = 2.0

    def __init__(self) -> None:
        self.rounds = 0.0
        self.skipped = 0
        self._accepted = 0.0
        self._verified = 0.0
        self._survival: Survival | None = None

    @property
    def gain(self) -> float:
        """Expected accepted tokens of a drafted round."""
        return (self._accepted + self.PRIOR_ROUNDS * self.PRIOR_GAIN) / (self.rounds + self.PRIOR_ROUNDS)

    @property
    def width(self) -> float:
        """Expected verified tokens of a drafted round."""
        return self._verified / self.rounds if self.rounds else np.inf  # until known, as many as fit

    def survival(self, slots: int) -> Survival:
        return np.ones(slots) if self._survival is None else self._survival

    def remember(self, row: Survival) -> None:
        self._survival = row if self._survival is None else 0.8 * self._survival + 0.2 * row

    def learn(self, verified: int, accepted: int) -> None:
        self.rounds = self.DECAY * self.rounds + 1
        self._verified = self.DECAY * self._verified + verified
        self._accepted = self.DECAY * self._accepted + accepted


def acceptance(logits: Survival) -> Survival:
    """c = σ(g) per slot; logits clamped to ±30, NaN as never accepted (the judge reports it).

    Cumulative products of it are survivals: they never increase along a row, which every rule here relies on.
    """
    return 1.0 / (1.0 + np.exp(-np.clip(np.nan_to_num(logits, nan=-30.0), -30.0, 30.0)))


def early_stop(survival: Survival, limits: Sequence[int], costs: StepCosts) -> tuple[int, ...]:
    """Algorithm 1 of the paper: admit slots by descending survival while the expected speed rises; stop at the first
    that does not raise it (spec E.2). Non-anticipating: admission of a slot looks at its own survival and larger ones.
    """
    owner, speeds = _speeds(survival, limits, costs)
    falls = np.flatnonzero(speeds[1:] <= speeds[:-1])
    return _per_request(owner[: falls[0] if len(falls) else len(owner)], len(limits))


def foresight(survival: Survival, past: Survival, limit: int, costs: StepCosts, margin: float = 0.0) -> int:
    """Slots of one request [K]: admit a slot while the expected speed can still rise from it on, by more than the
    share `margin`, a step in the costs crossed if need be. A slot that costs nothing is always admitted.

    What lies beyond slot k is not looked at but foretold: its fresh survival, falling on as `past` survivals do. So
    admission of a slot depends on its own survival and earlier ones, as the rule of this module asks.
    """
    committed = 1.0
    seconds = costs.seconds(1, 1 + np.arange(limit + 1))
    for slot in range(limit):
        onwards = survival[slot] * past[slot:limit] / max(float(past[slot]), 1e-12)
        speeds = (committed + onwards.cumsum()) / seconds[slot + 1 :]
        if seconds[slot + 1] > seconds[slot] and not speeds.max() > (1.0 + margin) * committed / seconds[slot]:
            return slot
        committed += float(survival[slot])
    return limit


def best_capacity(survival: Survival, limits: Sequence[int], costs: StepCosts) -> int:
    """The number of draft tokens with the highest expected speed. Only for survivals of past rounds (spec E.3)."""
    return int(_speeds(survival, limits, costs)[1].argmax())


def allocate(survival: Survival, limits: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Give `capacity` slots to the largest survivals; `capacity` must not depend on them (spec E.3)."""
    return _per_request(_admission_order(survival, limits)[0][:capacity], len(limits))


def _speeds(survival: Survival, limits: Sequence[int], costs: StepCosts) -> tuple[NDArray[np.int64], Survival]:
    """Owners of the slots in admission order [M], and Θ(m) of admitting the first m of them, m = 0 … M."""
    owner, values = _admission_order(survival, limits)
    committed = len(limits) + np.concatenate([[0.0], values.cumsum()])
    tokens = len(limits) + np.arange(len(owner) + 1)
    drafted = sum(limit > 0 for limit in limits)
    return owner, committed / costs.seconds(drafted, tokens)


def _admission_order(survival: Survival, limits: Sequence[int]) -> tuple[NDArray[np.int64], Survival]:
    """Requests [M] and survivals [M] of all slots within limits: descending, ties by slot, then by request."""
    request, slot = np.nonzero(np.arange(survival.shape[1]) < np.asarray(limits)[:, None])
    values = survival[request, slot]
    order = np.lexsort((request, slot, -values))
    return request[order], values[order]


def _per_request(owners: NDArray[np.int64], requests: int) -> tuple[int, ...]:
    # Counting, not looking at slots: survivals of a request never increase, so its admitted slots are its first ones.
    return tuple(int(n) for n in np.bincount(owners, minlength=requests))
