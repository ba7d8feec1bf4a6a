"""One engine rank at one moment, in one vocabulary, whichever engine it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from k3dspark.monitoring import histogram
from k3dspark.monitoring.dialects import DIALECTS, Dialect
from k3dspark.monitoring.exposition import Exposition, Sample
from k3dspark.monitoring.histogram import Histogram


@dataclass(frozen=True)
class Rank:
    """What one data-parallel rank of one engine says at `time` (seconds).

    `counters`: rounds, drafted, accepted, generated, prompt, … since the engine started; a key is absent where the
    engine has no such family. `accepted_per_slot[k]` is slot k+1's. `created` is when the rounds began to be counted.
    """

    source: str
    dialect: Dialect
    model: str
    rank: str
    time: float
    counters: Mapping[str, float] = field(default_factory=dict)
    accepted_per_slot: tuple[float, ...] = ()
    drafted_per_slot: tuple[float, ...] = ()
    gauges: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    created: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.source, self.dialect.name, self.model, self.rank


def read_ranks(exposition: Exposition, source: str, time: float) -> tuple[Rank, ...]:
    """Every rank that a scrape shows; empty when it comes from no engine that is known."""
    return tuple(
        rank
        for dialect in DIALECTS
        if exposition.has_prefix(dialect.prefix)
        for rank in _read(exposition, dialect, source, time)
    )


def missing_families(exposition: Exposition, ranks: tuple[Rank, ...]) -> tuple[str, ...]:
    """Names that a deployment with a draft would have and that no rank here has, as the engine spells them."""
    missing = []
    for dialect in {rank.dialect.name: rank.dialect for rank in ranks}.values():
        tables = (dialect.counters, dialect.gauges, dialect.histograms)
        known = {key: names for table in tables for key, names in table.items()}
        known["accepted_per_slot"] = (dialect.accepted_per_slot,)
        for wanted in dialect.wanted:
            names = [dialect.prefix + name for name in known[wanted]]
            if not exposition.series(names) and not any(f"{name}_count" in exposition.by_name for name in names):
                missing.append(names[0])
    return tuple(missing)


def _read(exposition: Exposition, dialect: Dialect, source: str, time: float) -> list[Rank]:
    counters: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    gauges: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    phases: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    created: dict[tuple[str, str], float] = {}

    def prefixed(names: tuple[str, ...]) -> list[str]:
        return [dialect.prefix + name for name in names]

    for key, names in dialect.counters.items():
        for identity, value in _by_rank(exposition.series(prefixed(names)), dialect).items():
            counters[identity][key] = value
    for key, names in dialect.gauges.items():
        for identity, value in _by_rank(exposition.series(prefixed(names)), dialect).items():
            # −1 is how exporters say "not supported"; none of these gauges can be negative.
            if value >= 0:
                gauges[identity][key] = value
    for sample in exposition.series([f"{dialect.prefix}engine_phase_seconds"]):
        phases[_identity(sample, dialect)][sample.labels.get("phase", "")] = sample.value
    for sample in exposition.by_name.get(f"{dialect.prefix}{dialect.counters.get('rounds', ('',))[0]}_created", ()):
        created[_identity(sample, dialect)] = sample.value
    times = _histograms(exposition, dialect)
    slots = _slots(exposition, dialect, dialect.accepted_per_slot)
    drafted = _slots(exposition, dialect, dialect.drafted_per_slot)
    return [
        Rank(
            source=source,
            dialect=dialect,
            model=identity[0],
            rank=identity[1],
            time=time,
            counters=counters.get(identity, {}),
            accepted_per_slot=slots.get(identity, ()),
            drafted_per_slot=drafted.get(identity, ()),
            gauges=gauges.get(identity, {}),
            histograms=times.get(identity, {}),
            seconds_by_phase=phases.get(identity, {}),
            created=created.get(identity),
        )
        for identity in sorted({*counters, *gauges, *times, *slots})
    ]


def _identity(sample: Sample, dialect: Dialect) -> tuple[str, str]:
    """(model, rank). A series without any rank label is the engine's whole, rank ''."""
    return sample.labels.get("model_name", ""), "/".join(
        sample.labels[label] for label in dialect.ranks if sample.labels.get(label)
    )


def _by_rank(samples: tuple[Sample, ...], dialect: Dialect) -> dict[tuple[str, str], float]:
    """Values summed over labels that split a total, such as a reason; of ranks that repeat each other, the first."""
    first: dict[tuple[str, str], tuple[str, ...]] = {}
    sums: dict[tuple[str, str], float] = {}
    for sample in sorted(samples, key=lambda sample: _copy(sample, dialect)):
        identity, copy = _identity(sample, dialect), _copy(sample, dialect)
        if first.setdefault(identity, copy) == copy:
            sums[identity] = sums.get(identity, 0.0) + sample.value
    return sums


def _copy(sample: Sample, dialect: Dialect) -> tuple[str, ...]:
    return tuple(sample.labels.get(label, "").rjust(6, "0") for label in dialect.copies)


def _slots(exposition: Exposition, dialect: Dialect, name: str) -> dict[tuple[str, str], tuple[float, ...]]:
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for sample in exposition.series([dialect.prefix + name]) if name else ():
        position = sample.labels.get("position", "")
        if position.isdecimal() and int(position) < 256:
            at = values[_identity(sample, dialect)]
            at[int(position)] = at.get(int(position), 0.0) + sample.value
    return {key: tuple(at.get(slot, 0.0) for slot in range(max(at) + 1)) for key, at in values.items()}


def _histograms(exposition: Exposition, dialect: Dialect) -> dict[tuple[str, str], dict[str, Histogram]]:
    found: dict[tuple[str, str], dict[str, Histogram]] = defaultdict(dict)
    for key, names in dialect.histograms.items():
        for name in (dialect.prefix + name for name in names):
            counts = exposition.by_name.get(f"{name}_count", ())
            for labels in {_identity(sample, dialect): _own_labels(sample, dialect) for sample in counts}.items():
                identity, own = labels
                if (read := histogram.read(exposition, (name,), own)) is not None:
                    found[identity].setdefault(key, read)
    return found


def _own_labels(sample: Sample, dialect: Dialect) -> dict[str, str]:
    return {label: sample.labels[label] for label in ("model_name", *dialect.ranks) if label in sample.labels}
