"""How often each slot of a block is kept: per kind of request, from metrics or given.

    {"survival": [0.86, 0.71, 0.59, ...]}                                 one kind of request
    {"classes": [{"weight": 3, "survival": [...]}, ...],                  several kinds
     "concentration": 4.0}                                                how much the confidence head knows

`survival[k]` is the share of rounds that kept slots 0 … k (`per_slot_acceptance` of `generate --json`, which is read
as it is); their sum is the acceptance length − 1. `concentration` is that of the Beta distribution of a slot's
acceptance around its mean, as far as confidence tells it: small means rounds differ much and the head sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.errors import BadInput

_BYTES: Final = 1 << 20
_ROUNDING: Final = 1e-6


@dataclass(frozen=True)
class AcceptanceProfile:
    """Survivals [classes, slots] and weights of the classes, which sum to 1."""

    survivals: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    concentration: float | None = None

    @property
    def slots(self) -> int:
        return len(self.survivals[0])

    def mean_survival(self) -> NDArray[np.float64]:
        """Survival of each slot over all rounds of a mix where every class has its weight in rounds."""
        mean: NDArray[np.float64] = np.average(np.array(self.survivals), axis=0, weights=self.weights)
        return mean

    def length(self, draft_tokens: int) -> float:
        """Acceptance length with that many draft tokens: tokens that a round brings, the target's own one included."""
        return 1.0 + float(self.mean_survival()[:draft_tokens].sum())

    def conditional(self) -> NDArray[np.float64]:
        """P(slot k is kept | all before were) [classes, slots]; 0 where nothing reaches the slot."""
        survivals = np.array(self.survivals)
        before = np.concatenate([np.ones((len(survivals), 1)), survivals[:, :-1]], axis=1)
        return np.divide(survivals, before, out=np.zeros_like(survivals), where=before > 0)


def read_profile(text: str, conditional: bool = False) -> AcceptanceProfile:
    """A profile from a JSON file or from numbers with commas. Raises `BadInput`."""
    if text.lower().endswith(".json") or Path(text).is_file():
        return profile_from(read_object(Path(text), _BYTES), text, conditional)
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise BadInput(
            f"--acceptance {text} is neither a file nor numbers", str(error), "pass 0.86,0.71,0.59 or a JSON file"
        ) from error
    return profile_from({"survival": numbers}, "--acceptance", conditional)


def profile_from(mapping: Mapping[str, Any], name: str, conditional: bool = False) -> AcceptanceProfile:
    """A profile from its JSON object. Raises `BadInput`."""
    classes = mapping.get("classes")
    if classes is None:
        classes = [{"weight": 1.0, "survival": mapping.get("survival", mapping.get("per_slot_acceptance"))}]
    if not isinstance(classes, list) or not classes or not all(isinstance(item, dict) for item in classes):
        raise _bad(name, '"classes" must be a list of objects with weight and survival')
    rows = [_row(name, item.get("survival"), conditional) for item in classes]
    if len({len(row) for row in rows}) != 1:
        raise _bad(name, "classes have different numbers of slots")
    weights = [_number(name, item.get("weight", 1.0), "weight") for item in classes]
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise _bad(name, "weights must not be negative, and not all 0")
    concentration = mapping.get("concentration")
    if concentration is not None and _number(name, concentration, "concentration") <= 0:
        raise _bad(name, "concentration must be positive")
    return AcceptanceProfile(
        tuple(rows),
        tuple(weight / total for weight in weights),
        None if concentration is None else float(concentration),
    )


def _row(name: str, values: Any, conditional: bool) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not 1 <= len(values) <= 64:
        raise _bad(name, "it needs 1 to 64 numbers, one for each slot")
    row = [_number(name, value, "survival") for value in values]
    if any(not 0.0 <= value <= 1.0 for value in row):
        raise _bad(name, "each number must lie between 0 and 1")
    if conditional:
        return tuple(float(value) for value in np.cumprod(row))
    if any(after > before + _ROUNDING for before, after in pairwise(row)):
        raise _bad(
            name,
            "a later slot cannot be kept more often than an earlier one; for rates given the slots before, "
            "pass --conditional",
        )
    return tuple(float(value) for value in np.minimum.accumulate(row))


def _number(name: str, value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _bad(name, f"{what} is {value!r}, which is no number")
    return float(value)


def _bad(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be used", why, "see docs/tune.md for the format")
