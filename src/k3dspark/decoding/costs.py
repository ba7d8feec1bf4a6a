"""What a round costs on this machine: measured once, read by the scheduler (spec E.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling
from k3dspark.target.protocol import RaggedRows, Target

Points = tuple[tuple[int, float], ...]
Shape = tuple[str, int]  # a kind of pass and its size


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a draft pass by number of requests, and of a target pass by number of rows.

    Between measured points the cost is interpolated; beyond the last one it grows with the slope of the last two.
    """

    draft: Points
    verify: Points

    def __post_init__(self) -> None:
        for name in ("draft", "verify"):
            points = getattr(self, name)
            sizes = [size for size, _ in points]
            if not points or sizes != sorted(set(sizes)) or sizes[0] < 1 or any(not s > 0 for _, s in points):
                raise BadInput(
                    f"the {name} costs are {points}", "sizes must rise from 1 and times be positive", "measure again"
                )

    @overload
    def seconds(self, drafted: int, tokens: float) -> float: ...
    @overload
    def seconds(self, drafted: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]: ...

    def seconds(self, drafted: int, tokens: float | NDArray[np.int64]) -> float | NDArray[np.float64]:
        """One round that drafts for `drafted` requests (0: no draft pass) and runs `tokens` target rows."""
        draft = float(_at(self.draft, np.asarray(drafted))) if drafted else 0.0
        verify = _at(self.verify, np.asarray(tokens))
        return draft + (verify if isinstance(tokens, np.ndarray) else float(verify))

    def level(self, rows: int) -> bool:
        """Whether a target pass of `rows` rows costs what one row does: then no draft token is dear."""
        return float(_at(self.verify, np.asarray(rows))) <= self.verify[0][1]

    def as_json(self) -> dict[str, object]:
        """{"draft": [[requests, seconds], …], "verify": [[rows, seconds], …]}."""
        return {"draft": [list(point) for point in self.draft], "verify": [list(point) for point in self.verify]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepCosts:
        """What `as_json` gave. Raises `BadInput`."""
        try:
            draft, verify = (tuple((int(n), float(s)) for n, s in value[name]) for name in ("draft", "verify"))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                "these are no step costs",
                f"lists of [size, seconds] are needed under draft and verify ({error!r})",
                "measure them again",
            ) from error
        return cls(draft, verify)

    @classmethod
    def synthetic(
        cls, base: float, per_token: float, knee: int, step: int = 1, draft: float = 0.0, most: int = 512
    ) -> StepCosts:
        """base + per_token · max(rows, knee), rows counted in whole steps; for tests and simulation."""
        rows = range(1, most + 1)
        verify = tuple((n, base + per_token * max(-(-n // step) * step, knee)) for n in rows)
        return cls(draft=((1, max(draft, 1e-12)),), verify=verify)


@torch.no_grad()
def measure(
    target: Target,
    draft: K3DSparkModel | None,
    requests: int = 1,
    context: int = 256,
    repeats: int = 20,
    candidates: int | None = None,
) -> StepCosts:
    """Times of draft and target passes on this machine for up to `requests` requests of `context` tokens.

    The median of `repeats`: the fastest would be of a moment when nothing else ran, and answers are given at others;
    rows, which are arithmetic, suffer more from company than weights, which are memory. All shapes take turns, so
    that a slow moment falls on each of them alike. More
    rows never cost less: where the clock says so it is noise, and neighbours are averaged. A target that runs whole
    tiles of rows (`tile_rows`) pays for the tile: its sizes within one share their mean.
    """
    block = draft.config.block_size if draft is not None else 0
    context = max(1, min(context, target.max_positions - block - 2))
    sequences = [_Probe(target, draft, context) for _ in range(requests)]
    try:
        shapes = dict.fromkeys(_sizes(requests, requests * (block + 1)), sequences)
        shapes |= dict.fromkeys(range(1, block + 2), sequences[:1])  # one request: every length counts
        runs = {("verify", rows): partial(_verify, target, probes, rows) for rows, probes in shapes.items()}
        if draft is not None:
            for count in _sizes(1, requests):
                runs["draft", count] = partial(_draft, draft, sequences[:count], candidates)
        seconds = _typical(runs, repeats)
    finally:
        for probe in sequences:
            target.close(probe.handle)
    drafts, verify = (
        sorted((size, s) for (of, size), s in seconds.items() if of == kind) for kind in ("draft", "verify")
    )
    tile = getattr(target, "tile_rows", 1) if getattr(target, "exact", False) else 1
    return StepCosts(_rising(drafts) or ((1, 1e-12),), _rising(_by_tile(verify, tile)))


class _Probe:
    """A sequence of arbitrary tokens to run passes on."""

    def __init__(self, target: Target, draft: K3DSparkModel | None, context: int) -> None:
        self.position = context
        self.handle = target.open(context + 64)
        self.context = draft.new_cache() if draft is not None else None
        for start in range(0, context, 256):
            ids = torch.arange(start, min(start + 256, context)) % target.vocab_size
            output = target.forward(RaggedRows((self.handle,), (len(ids),), ids, torch.empty(0, dtype=torch.long)))
            target.commit(self.handle, len(ids))
            if draft is not None and self.context is not None:
                positions = torch.arange(start, start + len(ids), device=output.taps.device)
                self.context.append(draft.context_rows(output.taps, positions))


def _verify(target: Target, probes: Sequence[_Probe], rows: int) -> None:
    each, more = divmod(rows, len(probes))
    lengths = tuple(each + (i < more) for i in range(len(probes)))
    output = target.forward(RaggedRows(tuple(p.handle for p in probes), lengths, torch.zeros(rows, dtype=torch.long)))
    output.logits.amax(-1).tolist()  # waits for the device, as a round does
    for probe in probes:
        target.commit(probe.handle, 0)


def _draft(draft: K3DSparkModel, probes: Sequence[_Probe], candidates: int | None) -> None:
    caches = [p.context for p in probes if p.context is not None]
    positions = torch.tensor([p.position for p in probes])
    draft.propose(caches, torch.zeros_like(positions), positions, DraftSampling(candidates=candidates)).tokens.tolist()


def _typical(runs: Mapping[Shape, Callable[[], None]], repeats: int) -> dict[Shape, float]:
    """Median seconds of `repeats` calls of every run."""
    times: dict[Shape, list[float]] = {shape: [] for shape in runs}
    for turn in range(repeats + 1):
        for shape, run in runs.items():
            started = perf_counter()
            run()
            if turn:  # the first call allocates and chooses kernels
                times[shape].append(perf_counter() - started)
    return {shape: median(seconds) for shape, seconds in times.items()}


def _by_tile(points: Sequence[tuple[int, float]], tile: int) -> list[tuple[int, float]]:
    """The mean of the sizes that need as many tiles, for each of them."""
    of_tiles: dict[int, list[float]] = {}
    for size, seconds in points:
        of_tiles.setdefault(-(-size // tile), []).append(seconds)
    return [(size, fmean(of_tiles[-(-size // tile)])) for size, _ in points]


def _rising(points: Sequence[tuple[int, float]]) -> Points:
    """The nearest non-decreasing curve in least squares (pool adjacent violators)."""
    pools: list[tuple[float, list[int]]] = []  # mean seconds, sizes
    for size, seconds in points:
        pools.append((seconds, [size]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, left), (high, right) = pools[-2:]
            pools[-2:] = [((low * len(left) + high * len(right)) / (len(left) + len(right)), left + right)]
    return tuple((size, seconds) for seconds, sizes in pools for size in sizes)


def _sizes(low: int, high: int) -> list[int]:
    """Powers of two from `low` to `high`, both ends included."""
    sizes = {low, high}
    return sorted(sizes | {2**n for n in range(high.bit_length()) if low < 2**n < high})


def _at(points: Points, where: NDArray[np.integer[Any] | np.floating[Any]]) -> NDArray[np.float64]:
    sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    inside = np.interp(where, sizes, seconds)
    if len(points) == 1:
        return inside
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    return inside + np.maximum(where.astype(np.float64) - sizes[-1], 0.0) * slope
