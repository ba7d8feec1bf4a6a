"""The Prometheus text format, read into series that can be asked for by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from k3dspark.errors import BadInput

LARGEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Sample:
    """One line of an exposition. NaN never gets here: it says that there is no value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """Everything that one scrape gave, by the name of the line."""

    by_name: Mapping[str, tuple[Sample, ...]]

    def series(self, names: Iterable[str]) -> tuple[Sample, ...]:
        """The lines of the first of these names that is there; counters are found with and without `_total`."""
        for name in names:
            for spelled in (f"{name}_total", name):
                if found := self.by_name.get(spelled):
                    return found
        return ()

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.by_name)


def parse(text: str, content_type: str = "", where: str = "the text") -> Exposition:
    """Read the text format, or OpenMetrics where the content type says so. Raises `BadInput` on anything else."""
    openmetrics = content_type.startswith("application/openmetrics-text") or text.rstrip().endswith("\n# EOF")
    try:
        families = list((parse_openmetrics if openmetrics else parse_text)(text))
    # The parser has no error class of its own: it lets through whatever a malformed line makes it stumble over.
    except Exception as error:
        raise BadInput(
            f"{where} is no Prometheus exposition",
            f"{type(error).__name__}: {str(error)[:200]}",
            "check that the address is the engine's /metrics and not a login page or a proxy's error",
        ) from error
    lines: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            if not math.isnan(sample.value):
                lines.setdefault(sample.name, []).append(Sample(sample.name, sample.labels, float(sample.value)))
    return Exposition({name: tuple(samples) for name, samples in lines.items()})
