"""How well predicted probabilities agree with what happened: ECE, AUROC, Brier score, reliability curve (spec §C).

Everything takes two one-dimensional arrays or tensors of the same length: probabilities, and outcomes (true or false).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BINS = 20  # DeepSpec's, on [0, 1], of equal width

Values = npt.ArrayLike | Tensor
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """The figures of one set of predictions. `auroc` is None where all outcomes are the same."""

    count: int
    mean_predicted: float
    mean_outcome: float
    ece: float
    auroc: float | None
    brier: float


@dataclass(frozen=True)
class CurveBin:
    """One bin of a reliability curve that holds predictions: how many, their mean, and the share that came true."""

    low: float
    high: float
    count: int
    predicted: float
    observed: float


def reliability(predicted: Values, outcome: Values, bins: int = BINS) -> Reliability | None:
    """All figures at once; None when there are no predictions."""
    p, y = _checked(predicted, outcome)
    if not p.size:
        return None
    return Reliability(p.size, float(p.mean()), float(y.mean()), ece(p, y, bins), auroc(p, y), brier(p, y))


def ece(predicted: Values, outcome: Values, bins: int = BINS) -> float:
    """Expected calibration error: Σ_b n_b/N · |mean prediction − share that came true|, equal-width bins on [0, 1]."""
    curve = reliability_curve(predicted, outcome, bins)
    total = sum(b.count for b in curve)
    return sum(b.count * abs(b.predicted - b.observed) for b in curve) / max(total, 1)


def auroc(predicted: Values, outcome: Values) -> float | None:
    """Chance that a prediction that came true is above one that did not, ties counting half; exact, from ranks.

    None where all outcomes are the same: there is nothing to tell apart.
    """
    p, y = _checked(predicted, outcome)
    positive = int(y.sum())
    negative = p.size - positive
    if not positive or not negative:
        return None
    _, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[inverse]  # mean rank of each group of equal predictions, from 1
    return float((ranks[y > 0].sum() - positive * (positive + 1) / 2) / (positive * negative))


def brier(predicted: Values, outcome: Values) -> float:
    """Mean squared difference between prediction and outcome; 0 when there are no predictions."""
    p, y = _checked(predicted, outcome)
    return float(((p - y) ** 2).mean()) if p.size else 0.0


def reliability_curve(predicted: Values, outcome: Values, bins: int = BINS) -> list[CurveBin]:
    """Bins from low to high, the empty ones left out; a prediction on an edge belongs to the bin above it, 1 to the
    last."""
    p, y = _checked(predicted, outcome)
    if bins < 1:
        raise ValueError(f"{bins} bins: one at least is needed")
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    predictions, outcomes = (np.bincount(place, weights=v, minlength=bins) for v in (p, y))
    return [
        CurveBin(
            b / bins, (b + 1) / bins, int(count[b]), float(predictions[b] / count[b]), float(outcomes[b] / count[b])
        )
        for b in range(bins)
        if count[b]
    ]


def _checked(predicted: Values, outcome: Values) -> tuple[_Floats, _Floats]:
    """Both as float64. Raises `ValueError` on different lengths, values outside [0, 1], or outcomes other than 0, 1."""
    p, y = _floats(predicted), _floats(outcome)
    if p.shape != y.shape or p.ndim != 1:
        raise ValueError(f"predictions of shape {p.shape} with outcomes of shape {y.shape}: two equal lists are needed")
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError("predictions must be probabilities from 0 to 1")
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("outcomes must be true or false")
    return p, y


def _floats(values: Any) -> _Floats:
    if isinstance(values, Tensor):
        values = values.detach().to(device="cpu", dtype=torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)
