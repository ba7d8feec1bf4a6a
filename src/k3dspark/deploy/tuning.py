"""From costs and acceptance to the draft length for each load, and to the option that the engine takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from k3dspark.deploy.acceptance_profile import AcceptanceProfile
from k3dspark.deploy.launch_files import LaunchDirectory, rewrite
from k3dspark.deploy.policies import Adaptive, ByBatch, Fixed, Lengths, Policy, best_by_batch
from k3dspark.deploy.simulation import Cluster, Result, Simulation, Workload
from k3dspark.deploy.step_costs import CostTable
from k3dspark.errors import BadInput

# Compact verification is advised in SGLang when it gains this much somewhere and loses no more anywhere.
_WORTH: Final = 0.02


@dataclass(frozen=True)
class Load:
    """One number of users (or rate): every policy's result, and where drafting begins to pay."""

    users: int
    rate: float
    batch: int
    """Requests in a replica's step, as the run without a draft had them on average."""
    results: tuple[Result, ...]
    break_even: tuple[tuple[int, float], ...]
    """(length, acceptance length at which drafting that much is as fast as none)."""

    @property
    def best(self) -> Result:
        return max(self.results, key=lambda result: result.tokens_per_second)

    @property
    def plain(self) -> Result:
        return self.results[0]

    def named(self, policy: str) -> Result:
        return next(result for result in self.results if result.policy == policy)


@dataclass(frozen=True)
class Tuning:
    """All loads, the table by batch size, and the one length for an engine that takes only one."""

    loads: tuple[Load, ...]
    table: Lengths
    one_length: int
    compact: bool
    profile: AcceptanceProfile
    cluster: Cluster


def tune(
    costs: CostTable,
    profile: AcceptanceProfile,
    cluster: Cluster,
    workload: Workload,
    users: Sequence[int] = (),
    rates: Sequence[float] = (),
    longest: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuning:
    """Simulate every policy at every load. Raises `BadInput`."""
    longest = min(longest or profile.slots, profile.slots)
    table = best_by_batch(costs, profile, cluster.sequences, longest)
    cut = replace(profile, survivals=tuple(row[:longest] for row in profile.survivals))
    policies: list[Callable[[], Policy]] = [
        *(partial(Fixed, length) for length in range(longest + 1)),
        partial(ByBatch, table),
        partial(Adaptive, costs),
    ]
    points = [replace(workload, users=n, rate=0.0, requests=_enough(workload.requests, n)) for n in users] + [
        replace(workload, users=0, rate=rate) for rate in rates
    ]
    if not points:
        raise BadInput("no load is given", "a length is right for a load", "pass --users or --rates")
    loads = []
    for index, point in enumerate(points):
        results = []
        for number, policy in enumerate(policies):
            # The same seed: every policy sees the same requests.
            results.append(Simulation(costs, cut, cluster, point, policy, seed).run())
            progress(index * len(policies) + number + 1, len(points) * len(policies))
        batch = max(1, round(results[0].mean_batch))
        even = tuple((k, costs.step(batch, k) / costs.step(batch, 0)) for k in range(1, longest + 1))
        loads.append(Load(point.users, point.rate, batch, tuple(results), even))
    one = _least_regret(loads, longest)
    return Tuning(tuple(loads), table, one, _compact(loads, one), profile, cluster)


def _enough(requests: int, users: int) -> int:
    """Requests to simulate at a load: few users answer in turn, and the same precision takes as many rounds each."""
    return min(requests, 40 * users)


def _least_regret(loads: Sequence[Load], longest: int) -> int:
    """The fixed length whose worst loss against the best fixed one, over all loads, is smallest."""
    speeds = np.array([[load.results[k].tokens_per_second for k in range(longest + 1)] for load in loads])
    regret = 1.0 - speeds / speeds.max(1, keepdims=True)
    return int(regret.max(0).argmin())


def _compact(loads: Sequence[Load], length: int) -> bool:
    gains = [load.named("adaptive").tokens_per_second / load.results[length].tokens_per_second - 1.0 for load in loads]
    return length > 0 and max(gains) > _WORTH and min(gains) > -_WORTH


def engine_option(tuning: Tuning, engine: str) -> dict[str, Any]:
    """The option that brings this tuning into an engine, by its own name."""
    if engine == "sglang":
        return {
            "--speculative-dspark-block-size": max(tuning.one_length, 1),
            "SGLANG_RAGGED_VERIFY_MODE": "compact" if tuning.compact else "static",
        }
    lengths = {length for _, _, length in tuning.table}
    if len(lengths) == 1 and 0 not in lengths:
        return {"num_speculative_tokens": lengths.pop()}
    return {
        "num_speculative_tokens": max(*lengths, 1),
        "num_speculative_tokens_per_batch_size": [list(item) for item in tuning.table],
    }


def write_into(tuning: Tuning, directory: LaunchDirectory, force: bool = False) -> LaunchDirectory:
    """Write the launch files again with this tuning. Raises `BadInput` when the engine's version lacks the option."""
    settled = directory.settled
    if max(length for _, _, length in tuning.table) > settled.facts.block_size:
        raise BadInput(
            "the acceptance profile does not belong to this plan",
            f"it has more slots than the draft's block of {settled.facts.block_size}",
            "measure the profile with this draft",
        )
    option = engine_option(tuning, settled.engine.name)
    if settled.engine.name == "sglang":
        return rewrite(
            directory, force, draft_tokens=option["--speculative-dspark-block-size"], adaptive=tuning.compact
        )
    lengths = option.get("num_speculative_tokens_per_batch_size", [])
    return rewrite(
        directory,
        force,
        draft_tokens=option["num_speculative_tokens"],
        lengths=tuple((start, end, length) for start, end, length in lengths),
        adaptive=False,
    )
