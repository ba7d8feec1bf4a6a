"""Prometheus histograms: differences, sums and quantiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from k3dspark.monitoring.exposition import Exposition


@dataclass(frozen=True)
class Histogram:
    """Observations so far, or in a window. `buckets` maps an upper bound to the observations at or below it."""

    count: float = 0.0
    sum: float = 0.0
    buckets: Mapping[float, float] = field(default_factory=dict)

    def minus(self, before: Histogram) -> Histogram:
        buckets = {bound: value - before.buckets.get(bound, 0.0) for bound, value in self.buckets.items()}
        return Histogram(self.count - before.count, self.sum - before.sum, buckets)

    def plus(self, other: Histogram) -> Histogram:
        """Both together. Where the bounds differ, those that both have: the only ones whose counts are known."""
        if not self.buckets or not other.buckets:
            return Histogram(self.count + other.count, self.sum + other.sum, self.buckets or other.buckets)
        shared = self.buckets.keys() & other.buckets.keys()
        buckets = {bound: self.buckets[bound] + other.buckets[bound] for bound in shared}
        return Histogram(self.count + other.count, self.sum + other.sum, buckets)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, share: float) -> float | None:
        """Linear inside the bucket, as Prometheus' histogram_quantile; above the last finite bound, that bound."""
        bounds = sorted(self.buckets)
        total = self.buckets[bounds[-1]] if bounds else 0.0
        if total <= 0 or self.count <= 0:
            return None
        rank, low, below = share * total, 0.0, 0.0
        for bound in bounds:
            reached = self.buckets[bound]
            if reached >= rank and reached > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (reached - below)
            low, below = (low if math.isinf(bound) else bound), reached
        return low


def read(exposition: Exposition, names: Iterable[str], labels: Mapping[str, str]) -> Histogram | None:
    """The histogram of the first of these names that has series with these labels, summed over all other labels."""
    for name in names:
        count, total, buckets = 0.0, 0.0, dict[float, float]()
        found = False
        for sample in exposition.by_name.get(f"{name}_count", ()):
            if labels.items() <= sample.labels.items():
                found, count = True, count + sample.value
        for sample in exposition.by_name.get(f"{name}_sum", ()):
            if labels.items() <= sample.labels.items():
                total += sample.value
        for sample in exposition.by_name.get(f"{name}_bucket", ()):
            if labels.items() <= sample.labels.items():
                bound = float(sample.labels.get("le", "inf"))
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
        if found:
            return Histogram(count, total, buckets)
    return None
