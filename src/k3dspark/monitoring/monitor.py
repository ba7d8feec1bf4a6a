"""Watching: scrapes come in, figures over a sliding window come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from k3dspark.errors import K3DSparkError
from k3dspark.monitoring.break_even import break_even
from k3dspark.monitoring.change import Change, between, since_start, total
from k3dspark.monitoring.devices import Device, known_exporter, read_devices
from k3dspark.monitoring.dialects import version_note
from k3dspark.monitoring.exposition import Exposition
from k3dspark.monitoring.figures import Figures, figures
from k3dspark.monitoring.ranks import Rank, missing_families, read_ranks
from k3dspark.monitoring.scrape import Scrape, Scraper
from k3dspark.monitoring.snapshot import ModelView, RankView, Snapshot, SourceView

Key = tuple[str, str, str, str]


@dataclass
class _Source:
    """What is remembered of one address between scrapes."""

    ranks: dict[Key, Rank] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    up: bool = False
    kind: str = ""
    fault: str = "not scraped yet"
    version: str = ""
    failures: int = 0
    resets: int = 0
    missing: tuple[str, ...] = ()
    last_seen: float | None = None


@dataclass
class _History:
    """Changes of one rank: those of the window one by one, all of them as a sum."""

    recent: deque[tuple[float, Change]] = field(default_factory=deque)
    whole: Change = field(default_factory=Change)

    def add(self, time: float, change: Change) -> None:
        self.recent.append((time, change))
        self.whole = self.whole.plus(change)

    def forget(self, before: float) -> None:
        """Drop what ended before; the last change stays, or a long interval would leave nothing to show."""
        while len(self.recent) > 1 and self.recent[0][0] < before:
            self.recent.popleft()


@dataclass(frozen=True)
class Costs:
    """What the user knows about step times, in seconds."""

    plain_step: float | None = None
    round: float | None = None


class Monitor:
    """Figures of some sources. `feed` takes scrapes, `snapshot` shows where things stand.

    `since_start`: count from the engine's own beginning, for when there is only one scrape. `plain`: the source of a
    server that runs the same target without a draft; it is compared with, not added up.
    """

    def __init__(
        self,
        sources: Sequence[str],
        window_seconds: float = 60.0,
        costs: Costs | None = None,
        plain: str | None = None,
        since_start: bool = False,
    ) -> None:
        self.sources = list(dict.fromkeys(sources))
        self._states = {source: _Source() for source in [*self.sources, *([plain] if plain else [])]}
        self._histories: dict[Key, _History] = {}
        self._window = window_seconds
        self._costs = costs or Costs()
        self._plain = plain
        self._since_start = since_start
        self._time = 0.0

    def poll(self, scraper: Scraper, read_local: Callable[[], Sequence[Device]] | None = None) -> Snapshot:
        """Scrape everything once; `read_local` gives the devices of this machine."""
        self.feed(scraper.scrape([*self._states]))
        for source, state in self._states.items():
            if state.up and state.kind == "vLLM" and not state.version:
                state.version = scraper.version(source) or "?"
        local: tuple[SourceView, ...] = ()
        devices: Sequence[Device] = ()
        if read_local is not None:
            try:
                devices, fault = read_local(), ""
            except K3DSparkError as error:
                fault = f"{error.what}: {error.why}"
            local = (_view("npu-smi", _Source(up=not fault, fault=fault, kind="npu-smi", last_seen=self._time)),)
        now = self.snapshot()
        return Snapshot(now.time, now.models, (*now.devices, *devices), (*now.sources, *local))

    def feed(self, scrapes: Iterable[Scrape]) -> None:
        """Take in one round of scrapes."""
        for scrape in scrapes:
            state = self._states[scrape.source]
            self._time = max(self._time, scrape.time)
            if scrape.exposition is None:
                state.up, state.fault, state.failures = False, scrape.fault, state.failures + 1
                continue
            state.up, state.fault, state.last_seen = True, "", scrape.time
            self._take(state, scrape.source, scrape.exposition, scrape.time)

    def _take(self, state: _Source, source: str, exposition: Exposition, time: float) -> None:
        ranks = read_ranks(exposition, source, time)
        state.devices = read_devices(exposition, source)
        state.missing = missing_families(exposition, ranks)
        engines = dict.fromkeys(rank.dialect.name for rank in ranks)
        state.kind = ", ".join(engines) or known_exporter(exposition)
        if not state.kind:
            state.fault = "it answers, but with no family of an engine or exporter that is known"
        restarted = False
        for rank in ranks:
            history = self._histories.setdefault(rank.key, _History())
            before = state.ranks.get(rank.key)
            if before is not None:
                change = between(before, rank)
                restarted = restarted or change.resets > 0
                history.add(time, change)
            elif self._since_start:
                history.add(time, since_start(rank))
            history.forget(time - self._window)
            state.ranks[rank.key] = rank
        gone = state.ranks.keys() - {rank.key for rank in ranks}
        for key in gone:
            del state.ranks[key]
        # A process restarts as a whole: its ranks are one event.
        state.resets += restarted

    def snapshot(self) -> Snapshot:
        """The figures of the window. Sources that do not answer are shown as such and count in no figure."""
        present = [
            rank
            for source in self.sources
            if self._states[source].up and source != self._plain
            for rank in self._states[source].ranks.values()
        ]
        plain = self._plain_figures()
        models = []
        for model in dict.fromkeys(rank.model for rank in present):
            parts = [(rank, self._recent(rank)) for rank in present if rank.model == model]
            whole = figures(parts)
            models.append(
                ModelView(
                    model,
                    whole,
                    tuple(RankView(r.source, r.dialect.name, r.rank, figures([(r, change)])) for r, change in parts),
                    break_even(whole, self._costs.plain_step, plain, self._costs.round),
                )
            )
        return Snapshot(
            self._time,
            tuple(models),
            tuple(device for state in self._states.values() if state.up for device in state.devices),
            tuple(_view(source, state) for source, state in self._states.items()),
        )

    def totals(self) -> list[tuple[Rank, Change]]:
        """Every rank as last seen, with all that it has done since the watching began."""
        return [
            (rank, self._histories[key].whole)
            for source in self.sources
            for key, rank in self._states[source].ranks.items()
        ]

    def _recent(self, rank: Rank) -> Change:
        return total(change for _, change in self._histories[rank.key].recent)

    def _plain_figures(self) -> Figures | None:
        if self._plain is None or not self._states[self._plain].up:
            return None
        return figures([(rank, self._recent(rank)) for rank in self._states[self._plain].ranks.values()])


def _view(source: str, state: _Source) -> SourceView:
    version = "" if state.version == "?" else state.version
    return SourceView(
        source,
        state.kind,
        state.up,
        state.fault,
        version,
        version_note(state.kind, version) if version else "",
        state.failures,
        state.resets,
        state.missing,
        state.last_seen,
    )
