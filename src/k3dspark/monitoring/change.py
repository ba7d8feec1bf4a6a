"""What happened between two scrapes of a rank. Counters are cumulative, so only differences say anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest

from k3dspark.monitoring.histogram import Histogram
from k3dspark.monitoring.ranks import Rank


@dataclass(frozen=True)
class Change:
    """Counts of one rank in `seconds`; `seconds` is 0 where nobody knows how long it took. `resets`: restarts seen."""

    seconds: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    accepted_per_slot: tuple[float, ...] = ()
    drafted_per_slot: tuple[float, ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    resets: int = 0

    def plus(self, other: Change) -> Change:
        """This and the one after it."""
        return Change(
            self.seconds + other.seconds,
            _added(self.counters, other.counters),
            _added_slots(self.accepted_per_slot, other.accepted_per_slot),
            _added_slots(self.drafted_per_slot, other.drafted_per_slot),
            {
                key: self.histograms.get(key, Histogram()).plus(other.histograms.get(key, Histogram()))
                for key in self.histograms.keys() | other.histograms.keys()
            },
            _added(self.seconds_by_phase, other.seconds_by_phase),
            self.resets + other.resets,
        )


def since_start(rank: Rank) -> Change:
    """Everything since the engine began to count."""
    seconds = rank.time - rank.created if rank.created is not None and rank.time > rank.created else 0.0
    return Change(
        seconds,
        rank.counters,
        rank.accepted_per_slot,
        rank.drafted_per_slot,
        rank.histograms,
        rank.seconds_by_phase,
    )


def between(before: Rank, after: Rank) -> Change:
    """What was added. After a restart that is what the new process counted: what the old one did last is lost."""
    seconds = max(after.time - before.time, 0.0)
    if restarted(before, after):
        fresh = since_start(after)
        return Change(
            seconds,
            fresh.counters,
            fresh.accepted_per_slot,
            fresh.drafted_per_slot,
            fresh.histograms,
            fresh.seconds_by_phase,
            resets=1,
        )
    return Change(
        seconds,
        {key: value - before.counters.get(key, 0.0) for key, value in after.counters.items()},
        _difference(after.accepted_per_slot, before.accepted_per_slot),
        _difference(after.drafted_per_slot, before.drafted_per_slot),
        {key: value.minus(before.histograms.get(key, Histogram())) for key, value in after.histograms.items()},
        {key: value - before.seconds_by_phase.get(key, 0.0) for key, value in after.seconds_by_phase.items()},
    )


def restarted(before: Rank, after: Rank) -> bool:
    """Whether the counters began anew in between: one of them fell, or they were created later.

    One fallen counter condemns all of them: a ratio of a fresh counter and an old one would mean nothing.
    """
    if before.created is not None and after.created is not None and after.created > before.created:
        return True
    fell = any(value < before.counters.get(key, 0.0) for key, value in after.counters.items())
    slots = zip_longest(after.accepted_per_slot, before.accepted_per_slot, fillvalue=0.0)
    counts = (
        value.count < before.histograms[key].count
        for key, value in after.histograms.items()
        if key in before.histograms
    )
    return fell or any(new < old for new, old in slots) or any(counts)


def total(changes: Iterable[Change]) -> Change:
    """Changes that follow each other in time, as one."""
    return reduce(Change.plus, changes, Change())


def _added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in left.keys() | right.keys()}


def _added_slots(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0.0))


def _difference(after: tuple[float, ...], before: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip_longest(after, before, fillvalue=0.0))
