"""Who decides how many draft tokens a step verifies: nobody, a constant, a table by batch size, or confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from k3dspark.deploy.acceptance_profile import AcceptanceProfile
from k3dspark.deploy.step_costs import CostTable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Lengths = tuple[tuple[int, int, int], ...]


class Policy(Protocol):
    """One replica asks once a step. `chances` [requests, slots] is what confidence says of this step's drafts: the
    probability that a slot is kept if those before it are."""

    @property
    def name(self) -> str: ...

    def lengths(self, chances: Floats) -> Ints | None:
        """Draft tokens to verify for each request, or None for a step without a draft pass."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same length always; 0 is no draft."""

    length: int

    @property
    def name(self) -> str:
        return f"fixed {self.length}" if self.length else "no draft"

    def lengths(self, chances: Floats) -> Ints | None:
        return np.full(len(chances), self.length, dtype=np.int64) if self.length else None


@dataclass(frozen=True)
class ByBatch:
    """A length for each range of batch sizes, the last one beyond the table; vLLM's
    num_speculative_tokens_per_batch_size."""

    table: Lengths
    name: str = "by batch size"

    def length(self, batch: int) -> int:
        return next((length for start, end, length in self.table if start <= batch <= end), self.table[-1][2])

    def lengths(self, chances: Floats) -> Ints | None:
        return Fixed(self.length(len(chances))).lengths(chances)


class Adaptive:
    """Confidence-scheduled verification (spec E.3): the number of tokens from the step before, where a best over
    everything is allowed, and who gets them from this step's confidence. Always drafts, as the engines do."""

    name = "adaptive"

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self._share: float | None = None

    def lengths(self, chances: Floats) -> Ints | None:
        survival = chances.cumprod(1)
        requests, slots = survival.shape
        order = np.argsort(-survival, axis=None, kind="stable")
        values = survival.ravel()[order]
        # As many as the last step's confidence said, scaled to this step's requests.
        tokens = requests * slots if self._share is None else round(self._share * requests)
        gain = requests + np.concatenate([[0.0], values.cumsum()])
        self._share = int((gain / self._costs.drafted_curve(requests, len(values))).argmax()) / requests
        # Survivals of a request never rise, so its chosen slots are its first ones: counting them is enough.
        return np.bincount(order[:tokens] // slots, minlength=requests).astype(np.int64)


def best_length(costs: CostTable, profile: AcceptanceProfile, batch: int, longest: int) -> int:
    """The length with the most tokens a second at a constant batch: argmax of E[tokens of a round] / step time.
    Of equals, the shortest."""
    speeds = [profile.length(length) / costs.step(batch, length) for length in range(longest + 1)]
    return int(np.argmax(np.array(speeds) > max(speeds) * (1 - 1e-9)))


def best_by_batch(costs: CostTable, profile: AcceptanceProfile, batches: int, longest: int) -> Lengths:
    """The best length for each batch size from 1 to `batches`, as ranges."""
    return as_ranges([best_length(costs, profile, batch, longest) for batch in range(1, batches + 1)])


def as_ranges(lengths: Sequence[int]) -> Lengths:
    """(first batch, last batch, length) of each run of equal lengths."""
    ranges: list[tuple[int, int, int]] = []
    for batch, length in enumerate(lengths, 1):
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], batch, length)
        else:
            ranges.append((batch, batch, length))
    return tuple(ranges)
