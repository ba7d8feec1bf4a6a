"""A discrete-event simulation of requests on replicas that decode in steps, drafting or not.

Events are arrivals and ends of steps, taken in order of time. A replica takes waiting requests in when a step ends, up
to its limit; a step lasts what the cost table says; at its end every request of it commits the accepted part of its
draft and one token of the target. A new request goes to the replica with the fewest. Nothing is averaged: each
request's tokens are counted, and what goes in comes out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from k3dspark.deploy.acceptance_profile import AcceptanceProfile
from k3dspark.deploy.policies import Policy
from k3dspark.deploy.step_costs import CostTable
from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Workload:
    """Requests: how many, how long, and when. `users` of them at a time, each sending the next when one is answered;
    or, with `rate`, at random times, that many a second."""

    requests: int = 2000
    users: int = 0
    rate: float = 0.0
    output_tokens: int = 256
    varied: bool = True
    """Output lengths spread geometrically around the mean; otherwise all are equal."""
    prompt_tokens: int = 0
    prefill_seconds_per_token: float = 0.0
    """Time that a prompt's token adds to the step in which its request is taken in."""


@dataclass(frozen=True)
class Cluster:
    """Replicas (data parallel ranks) that each run up to `sequences` requests at once."""

    replicas: int = 1
    sequences: int = 16


@dataclass(frozen=True)
class Result:
    """What one simulation counted. Times in seconds; waiting is from arrival to being taken in."""

    policy: str
    requests: int
    tokens: int
    asked_tokens: int
    rounds: int
    steps: int
    drafted: int
    accepted: int
    unused: int
    seconds: float
    busy_seconds: float
    mean_batch: float
    waiting: NDArray[np.float64] = field(repr=False)
    per_token: NDArray[np.float64] = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.accepted / self.rounds

    @property
    def mean_length(self) -> float:
        """Draft tokens verified for each request and round."""
        return self.drafted / self.rounds


@dataclass
class _Replica:
    policy: Policy
    waiting: deque[int] = field(default_factory=deque)
    active: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    running: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.active)


class Simulation:
    """One run; `policy` makes a policy for each replica, since policies remember."""

    def __init__(
        self,
        costs: CostTable,
        profile: AcceptanceProfile,
        cluster: Cluster,
        workload: Workload,
        policy: Callable[[], Policy],
        seed: int = 0,
    ) -> None:
        if workload.requests < 1 or workload.output_tokens < 1 or cluster.replicas < 1 or cluster.sequences < 1:
            raise BadInput(
                "nothing can be simulated",
                "requests, output tokens, replicas and sequences are at least 1",
                "correct it",
            )
        if (workload.users > 0) == (workload.rate > 0):
            raise BadInput("the load is not clear", "it is either a number of users or a rate", "pass one of them")
        self.costs, self.cluster, self.workload = costs, cluster, workload
        self._random = np.random.default_rng(seed)
        self._replicas = [_Replica(policy()) for _ in range(cluster.replicas)]
        self._conditional, self._concentration = profile.conditional(), profile.concentration
        count = workload.requests
        self._kind = self._random.choice(len(profile.weights), count, p=profile.weights)
        spread = self._random.geometric(1.0 / workload.output_tokens, count)
        self._asked = spread if workload.varied else np.full(count, workload.output_tokens)
        self._left = self._asked.copy()
        self._arrived, self._taken, self._ended = np.zeros(count), np.zeros(count), np.zeros(count)
        self._events: list[tuple[float, int, int]] = []  # time, order, replica or −1 for an arrival
        self._order = self._sent = self._done = 0
        self._rounds = self._steps = self._drafted = self._accepted = self._unused = 0
        self._busy = 0.0

    def run(self) -> Result:
        """Every request from its arrival to its last token."""
        self._first_arrivals()
        now = 0.0
        while self._events:
            now, _, replica = heapq.heappop(self._events)
            if replica < 0:
                self._arrive(now)
            else:
                self._end_step(now, self._replicas[replica], replica)
        tokens = int((self._asked - self._left).sum())
        return Result(
            policy=self._replicas[0].policy.name,
            requests=self._done,
            tokens=tokens,
            asked_tokens=int(self._asked.sum()),
            rounds=self._rounds,
            steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
            unused=self._unused,
            seconds=now,
            busy_seconds=self._busy,
            mean_batch=self._rounds / self._steps,
            waiting=self._taken - self._arrived,
            per_token=(self._ended - self._taken) / self._asked,
        )

    def _first_arrivals(self) -> None:
        if self.workload.users:
            for _ in range(min(self.workload.users, self.workload.requests)):
                self._schedule(0.0, -1)
            return
        gaps = self._random.exponential(1.0 / self.workload.rate, self.workload.requests)
        for time in gaps.cumsum():
            self._schedule(float(time), -1)

    def _schedule(self, time: float, replica: int) -> None:
        heapq.heappush(self._events, (time, self._order, replica))
        self._order += 1

    def _arrive(self, now: float) -> None:
        request, self._sent = self._sent, self._sent + 1
        self._arrived[request] = now
        index = min(range(len(self._replicas)), key=lambda n: self._replicas[n].load)
        replica = self._replicas[index]
        replica.waiting.append(request)
        if not replica.running:
            # At the same instant others may arrive: the step begins after them.
            replica.running = True
            self._schedule(now, index)

    def _end_step(self, now: float, replica: _Replica, index: int) -> None:
        if len(replica.active):
            self._commit(now, replica)
        taken: list[int] = []
        while replica.waiting and len(replica.active) + len(taken) < self.cluster.sequences:
            taken.append(replica.waiting.popleft())
        if taken:
            self._taken[taken] = now
            replica.active = np.concatenate([replica.active, np.array(taken, dtype=np.int64)])
        replica.running = len(replica.active) > 0
        if replica.running:
            prefill = len(taken) * self.workload.prompt_tokens * self.workload.prefill_seconds_per_token
            seconds = self._begin_step(replica) + prefill
            self._busy += seconds
            self._schedule(now + seconds, index)

    def _begin_step(self, replica: _Replica) -> float:
        active = replica.active
        count = len(active)
        chances = self._chances(self._conditional[self._kind[active]])  # [requests, slots]
        lengths = replica.policy.lengths(chances)
        self._steps += 1
        self._rounds += count
        if lengths is None:
            replica.accepted = np.zeros(count, dtype=np.int64)
            return self.costs.step(count, 0)
        kept = (self._random.random(chances.shape) < chances).cumprod(1).sum(1)
        replica.accepted = np.minimum(kept, lengths)
        tokens = int(lengths.sum())
        self._drafted += tokens
        self._accepted += int(replica.accepted.sum())
        return self.costs.drafted_step(count, float(tokens))

    def _chances(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._concentration is None:
            return means
        # Beta draws keep the mean, so acceptance over many rounds is the profile's, whatever the concentration.
        a = np.clip(means, 1e-9, 1 - 1e-9) * self._concentration
        return self._random.beta(a, self._concentration - a)

    def _commit(self, now: float, replica: _Replica) -> None:
        active, brought = replica.active, replica.accepted + 1
        used = np.minimum(brought, self._left[active])
        self._unused += int((brought - used).sum())  # a round may bring more than a request still asks for
        self._left[active] -= used
        done = active[self._left[active] == 0]
        replica.active = active[self._left[active] > 0]
        self._ended[done] = now
        self._done += len(done)
        if self.workload.users:
            for _ in range(min(len(done), self.workload.requests - self._sent - self._pending())):
                self._schedule(now, -1)

    def _pending(self) -> int:
        return sum(1 for _, _, replica in self._events if replica < 0)
