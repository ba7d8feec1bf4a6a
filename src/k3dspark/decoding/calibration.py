"""What turns confidence into a probability under one sampling setting: a file beside the draft, or past rounds.

σ(g / T_k) with one temperature per slot keeps the order of confidences within a slot, and every T is known before the
round it is used in: so no calibration can make a schedule look ahead (spec §E).

`calibration.json`, written by `k3dspark calibrate`:

    {"schema": "k3dspark.calibration/1",
     "draft": "sha256:…",                       fingerprint of the draft it was fitted for
     "settings": {"greedy": {"temperatures": [T_1, …, T_K], …}, "temperature=1,top_p=0.95": {…}}}

The key of a setting is its `Setting.key`; what else an entry holds is for people to read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.decoding.params import SamplingParams
from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel

CALIBRATION_FILE = "calibration.json"
SCHEMA = "k3dspark.calibration/1"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """What of a request's sampling decides how often a draft token is accepted."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verifier: Literal["block", "token"] = "block"

    @classmethod
    def of(cls, params: SamplingParams) -> Setting:
        """The setting of a request; all greedy ones are the same."""
        if params.greedy:
            return cls()
        return cls(float(params.temperature), params.top_k, float(params.top_p), float(params.min_p), params.verifier)

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting of a key such as "greedy" or "temperature=1,top_p=0.95,verify=token". Raises `BadInput`."""
        if text.strip() == "greedy":
            return cls()
        kinds: dict[str, type[int] | type[float] | type[str]] = {
            "temperature": float, "top_k": int, "top_p": float, "min_p": float, "verify": str,
        }  # fmt: skip
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            try:
                if name in found:
                    raise ValueError(f"{name} stands there twice")
                found[name] = kinds[name](value)
            except (KeyError, ValueError) as error:
                raise BadInput(
                    f"{text!r} is not a sampling setting",
                    f"{part.strip()!r} is not one of {', '.join(kinds)} with its value ({error})",
                    'write "greedy", or for example "temperature=1,top_p=0.95"',
                ) from error
        found["verifier"] = found.pop("verify", "block")
        setting = cls.of(SamplingParams(**found))  # which checks the numbers
        if setting == cls() and found.get("temperature") is None:
            raise BadInput(
                f"{text!r} is not a sampling setting", "it names no temperature", 'add one, or write "greedy"'
            )
        return setting

    @property
    def key(self) -> str:
        """The one text of this setting: values that are off are left out, and so is block verification."""
        if self == Setting():
            return "greedy"
        parts = [f"temperature={self.temperature:g}"]
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        parts += [f"min_p={self.min_p:g}"] if self.min_p else []
        parts += [f"verify={self.verifier}"] if self.verifier != "block" else []
        return ",".join(parts)

    def params(self, **others: Any) -> SamplingParams:
        """Sampling parameters of this setting, and `others` beside them."""
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            verifier=self.verifier, **others,
        )  # fmt: skip


class Temperatures(Protocol):
    """What a scheduler asks before a round: T of every slot under a setting."""

    def temperatures(self, setting: str, slots: int) -> Floats:
        """T [slots] for requests of this setting (a `Setting.key`), from past rounds only."""
        ...


@dataclass(frozen=True)
class Calibration:
    """Temperatures per setting, fitted beforehand; a setting that was not fitted gets 1, which changes nothing."""

    settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def temperatures(self, setting: str, slots: int) -> Floats:
        fitted = self.settings.get(setting, ())[:slots]
        return np.array([*fitted, *[1.0] * (slots - len(fitted))])

    def covers(self, setting: Setting) -> bool:
        """Whether this setting was fitted."""
        return setting.key in self.settings


def fingerprint(draft: K3DSparkModel) -> str:
    """Names a draft by the weights next to its confidence, the same in whichever format they were loaded.

    A calibration does not carry over to another draft, nor to the same one trained further. Raises `BadInput` for a
    draft without a confidence head.
    """
    if draft.confidence_head is None:
        raise no_confidence_head()
    digest = hashlib.sha256()
    for weight in (draft.confidence_head.proj.weight, draft.confidence_head.proj.bias, draft.final_norm.weight):
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def no_confidence_head() -> BadInput:
    """The error of every use of confidence with a draft that has none."""
    return BadInput(
        "this draft has no confidence head",
        "its config.json says enable_confidence_head: false, so nothing predicts which of its tokens will stand",
        "use --schedule full or --draft-length N, or a draft trained with enable_confidence_head: true",
    )


def read_calibration(directory: Path, draft: K3DSparkModel) -> Calibration | None:
    """The calibration beside a draft; None when there is none, or when it was fitted for other weights.

    Raises `BadInput` when the file is damaged.
    """
    path = directory / CALIBRATION_FILE
    if draft.confidence_head is None or not path.is_file():
        return None
    content = read_object(path)
    settings = content.get("settings")
    if content.get("schema") != SCHEMA or not isinstance(settings, dict):
        raise _damaged(path, f"it is not of schema {SCHEMA}")
    if content.get("draft") != fingerprint(draft):
        return None
    return Calibration({key: _temperatures(path, key, entry) for key, entry in settings.items()})


def _temperatures(path: Path, key: str, entry: Any) -> tuple[float, ...]:
    values = entry.get("temperatures") if isinstance(entry, dict) else None
    if not isinstance(values, list) or not all(
        isinstance(t, int | float) and not isinstance(t, bool) and math.isfinite(t) and t > 0 for t in values
    ):
        raise _damaged(path, f'"{key[:80]}" has no list of temperatures above 0')
    return tuple(float(t) for t in values)


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path} cannot be used", why, "run `k3dspark calibrate` again, or delete the file to schedule uncalibrated"
    )


class OnlineCalibration:
    """Temperatures that follow the rounds of this engine, starting from a calibration or from 1.

    Per setting and slot: a histogram of the logits of past trials and how many were accepted, which fades with every
    round. Slot k is a trial only where slot k−1 was accepted and slot k verified, so a round cut short is no
    evidence against what it never ran. T minimises the cross-entropy of σ(g / T) over a grid; a prior worth
    `PRIOR_WEIGHT` trials holds it where it started until there is evidence (spec §E, online variant).

    `observe` is called after a round, so what a round brought decides only about later ones.
    """

    BINS = 16
    REACH = 8.0  # bins cover logits of ±8; those beyond fall into the outermost
    DECAY = 0.999
    PRIOR_WEIGHT = 64.0
    GRID = np.geomspace(1 / 8, 8, 49)
    REFIT_EVERY = 16  # rounds: a fit takes longer than a round of counting

    def __init__(self, start: Temperatures | None = None) -> None:
        self._start = start or Calibration()
        self._known: dict[str, _Counts] = {}

    def temperatures(self, setting: str, slots: int) -> Floats:
        known = self._known.get(setting)
        return self._start.temperatures(setting, slots) if known is None else known.temperatures[:slots]

    def observe(
        self, settings: Sequence[str], logits: Floats, verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from a finished round: confidence logits [B, K], draft tokens verified and accepted per request."""
        slots = logits.shape[1] if logits.ndim == 2 else 0
        for setting, row, ran, stood in zip(settings, logits, verified, accepted, strict=True):
            tried = min(ran, stood + 1, slots)
            if not tried:
                continue
            known = self._known.get(setting)
            if known is None:
                known = self._known[setting] = _Counts(self._start.temperatures(setting, slots))
            known.add(row[:tried], stood)


class _Counts:
    """Faded counts of one setting: per slot and logit bin, trials, sum of logits, and acceptances."""

    def __init__(self, start: Floats) -> None:
        self.temperatures = start
        self._start = start
        shape = (len(start), OnlineCalibration.BINS)
        self._trials, self._sums, self._accepted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._rounds = 0

    def add(self, logits: Floats, accepted: int) -> None:
        reach, bins = OnlineCalibration.REACH, OnlineCalibration.BINS
        logits = np.clip(np.nan_to_num(logits, nan=-reach), -reach, reach)
        place = np.minimum(((logits + reach) * (bins / (2 * reach))).astype(np.int64), bins - 1)
        slot = np.arange(len(logits))
        for counts in (self._trials, self._sums, self._accepted):
            counts *= OnlineCalibration.DECAY
        self._trials[slot, place] += 1
        self._sums[slot, place] += logits
        self._accepted[slot, place] += slot < accepted
        self._rounds += 1
        if self._rounds % OnlineCalibration.REFIT_EVERY == 0:
            self.temperatures = self._fit()

    def _fit(self) -> Floats:
        grid = OnlineCalibration.GRID
        seen = self._trials > 0
        mean = np.divide(self._sums, self._trials, out=np.zeros_like(self._sums), where=seen)  # [K, bins]
        total = self._trials.sum(1, keepdims=True)
        # The prior: trials with the logits seen so far, accepted exactly as often as the starting temperature says.
        prior = OnlineCalibration.PRIOR_WEIGHT * np.divide(
            self._trials, total, where=total > 0, out=np.zeros_like(mean)
        )
        trials = self._trials + prior
        accepted = self._accepted + prior / (1.0 + np.exp(-mean / self._start[:, None]))
        scaled = mean[None] / grid[:, None, None]  # [G, K, bins]
        # log σ(x) = −log(1 + e^−x), log σ(−x) = log σ(x) − x
        loss = (trials * np.logaddexp(0.0, -scaled) + (trials - accepted) * scaled).sum(-1)  # [G, K]
        best = grid[loss.argmin(0)]
        return np.where(total[:, 0] > 0, best, self._start)
