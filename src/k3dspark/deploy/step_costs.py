"""What one step of a running engine takes, by concurrent requests and draft length: measured, read from JSON.

    {"format": 1, "source": "any words",
     "steps": [{"requests": 1, "length": 0, "seconds": 0.0215}, {"requests": 1, "length": 7, "seconds": 0.0290}, ...]}

`length` is the number of draft tokens that each request verified in that step; 0 is a step without a draft pass, any
other includes it. `k3dspark bench --costs` writes such a file, with `prefill_seconds_per_token` beside the steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.errors import BadInput

_BYTES: Final = 1 << 20
Curve = tuple[tuple[float, float], ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, interpolated linearly in length and requests; beyond the table it grows with the last slope,
    never below the last value."""

    plain: Curve
    """(requests, seconds) without a draft."""
    drafted: tuple[tuple[float, Curve], ...]
    """(requests, ((length, seconds), …)) with one."""
    source: str = ""
    prefill_seconds_per_token: float = 0.0
    _known: dict[tuple[int, float], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _curves: dict[tuple[int, int], Floats] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, requests: int, length: float) -> float:
        """A step of `requests` requests that verify `length` draft tokens each; 0 is without a draft pass."""
        return self.drafted_step(requests, length * requests) if length > 0 else self._remembered(requests, -1.0)

    def drafted_step(self, requests: int, tokens: float) -> float:
        """A step with a draft pass that verifies `tokens` draft tokens in all, shared out in any way."""
        return self._remembered(requests, tokens)

    def drafted_curve(self, requests: int, most: int) -> Floats:
        """`drafted_step` of 0 … `most` tokens."""
        key = requests, most
        if key not in self._curves:
            self._curves[key] = self.drafted_steps(requests, np.arange(most + 1, dtype=np.float64))
        return self._curves[key]

    def _remembered(self, requests: int, tokens: float) -> float:
        # A simulation asks for the same few steps hundreds of thousands of times.
        key = requests, tokens
        if key not in self._known:
            known = _at(self.plain, requests) if tokens < 0 else self.drafted_steps(requests, np.asarray([tokens]))[0]
            self._known[key] = float(known)
        return self._known[key]

    def drafted_steps(self, requests: int, tokens: Floats) -> Floats:
        """`drafted_step` for many numbers of tokens at once."""
        lengths = tokens / requests
        low, high, weight = _bracket([size for size, _ in self.drafted], requests)
        first = _curve(self.drafted[low][1], lengths)
        if low == high:
            return first
        second = _curve(self.drafted[high][1], lengths)
        mixed = first + weight * (second - first)
        # Beyond the last measured number of requests a step does not get cheaper.
        return np.maximum(mixed, second) if weight > 1.0 else mixed


def read_costs(path: Path) -> CostTable:
    """A cost table. Raises `BadInput` naming what is wrong."""
    return costs_from(read_object(path, _BYTES), str(path))


def costs_from(mapping: Mapping[str, Any], name: str = "the cost table") -> CostTable:
    """A cost table from its JSON object. Raises `BadInput`."""
    if mapping.get("format") != 1 or not isinstance(mapping.get("steps"), list):
        raise _bad(name, 'it must hold "format": 1 and a list "steps"')
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for index, step in enumerate(mapping["steps"]):
        if not isinstance(step, dict):
            raise _bad(name, f"steps[{index}] is no object")
        requests, length, seconds = (step.get(key) for key in ("requests", "length", "seconds"))
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (requests, length))
        if not whole or not 1 <= requests <= 1 << 20 or not 0 <= length <= 64:  # type: ignore[operator]
            raise _bad(name, f"steps[{index}] needs whole numbers requests (from 1) and length (0 to 64)")
        if not isinstance(seconds, int | float) or not math.isfinite(seconds) or not 0 < seconds < 3600:
            raise _bad(name, f"steps[{index}].seconds is {seconds!r}, and must be a positive number of seconds")
        times[requests, length].append(float(seconds))  # type: ignore[index]
    medians = {key: float(np.median(values)) for key, values in times.items()}
    plain = tuple(sorted((float(r), s) for (r, k), s in medians.items() if k == 0))
    by_requests: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (requests, length), seconds in medians.items():
        if length:
            by_requests[requests].append((float(length), seconds))
    if not plain:
        raise _bad(name, "it has no step without a draft (length 0), so nothing tells what drafting gains")
    if not by_requests:
        raise _bad(name, "it has no step with a draft (length 1 or more)")
    drafted = tuple((float(r), tuple(sorted(curve))) for r, curve in sorted(by_requests.items()))
    prefill = mapping.get("prefill_seconds_per_token", 0.0)
    if not isinstance(prefill, int | float) or not math.isfinite(prefill) or not 0 <= prefill < 3600:
        raise _bad(name, f"prefill_seconds_per_token is {prefill!r}, and must be a number of seconds")
    return CostTable(plain, drafted, str(mapping.get("source", ""))[:200], float(prefill))


def _bad(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be used", why, "measure with k3dspark bench, or see docs/tune.md for the format")


def _at(curve: Curve, where: float) -> float:
    return float(_curve(curve, np.asarray([where], dtype=np.float64))[0])


def _curve(curve: Curve, where: Floats) -> Floats:
    sizes, seconds = (np.array(column) for column in zip(*curve, strict=True))
    inside: Floats = np.interp(where, sizes, seconds)
    if len(curve) == 1:
        return inside
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    # Below the first length the line to it goes on: a draft pass without verification still costs its own time.
    start = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
    below = np.maximum(sizes[0] - where, 0.0) * start
    return np.maximum(inside + np.maximum(where - sizes[-1], 0.0) * slope - below, 0.1 * seconds[0])


def _bracket(sizes: Sequence[float], where: float) -> tuple[int, int, float]:
    """Indices of the neighbours of `where`, and how far it lies from the first to the second; above 1 beyond them."""
    if len(sizes) == 1 or where <= sizes[0]:
        return 0, 0, 0.0
    high = min(bisect_right(sizes, where), len(sizes) - 1)
    return high - 1, high, (where - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
