"""What turns confidence into a probability under one sampling setting: a file beside the draft, or past rounds.

c_k = σ(g_k / T_k + b_k), with a temperature and a shift per slot. T > 0 keeps the order of confidences within a slot,
and both numbers are known before the round they are used in: no calibration can make a schedule look ahead (spec §E).
The paper scales by T alone, which leaves σ(0) = ½ where it is; a head trained on the acceptance of sampled tokens is
off by more than that when decoding is greedy, so here the shift is fitted too.

`calibration.json`, written by `k3dspark calibrate`:

    {"schema": "k3dspark.calibration/1",
     "draft": "sha256:…",                       fingerprint of the draft it was fitted for
     "settings": {"greedy": {"temperatures": [T_1, …, T_K], "shifts": [b_1, …, b_K], …},
                  "temperature=1,top_p=0.95": {…}}}

The key of a setting is its `Setting.key`; what else an entry holds is for people to read.
"""

from __future__ import annotations

import hashlib
import sys
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


@dataclass(frozen=True)
class Scaling:
    """T and b of every slot, [K] each."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]

    def __call__(self, logits: Floats) -> Floats:
        """g / T + b of logits [..., K]; slots that were not fitted stay as they are."""
        slots, known = logits.shape[-1], len(self.temperatures)
        temperatures = np.array([*self.temperatures, *[1.0] * (slots - known)][:slots])
        shifts = np.array([*self.shifts, *[0.0] * (slots - known)][:slots])
        return logits / temperatures + shifts


UNCHANGED = Scaling((), ())


class Scalings(Protocol):
    """What a scheduler asks before a round."""

    def scaling(self, setting: str) -> Scaling:
        """For requests of this setting (a `Setting.key`); it rests on past rounds only."""
        ...


@dataclass(frozen=True)
class Calibration:
    """Scalings per setting, fitted beforehand; a setting that was not fitted is left as it is."""

    settings: Mapping[str, Scaling] = field(default_factory=dict)

    def scaling(self, setting: str) -> Scaling:
        return self.settings.get(setting, UNCHANGED)

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
    return Calibration({key: _scaling(path, key, entry) for key, entry in settings.items()})


def _scaling(path: Path, key: str, entry: Any) -> Scaling:
    lists = [entry.get(name) if isinstance(entry, dict) else None for name in ("temperatures", "shifts")]
    numbers = [[float(v) for v in values if _is_number(v)] if isinstance(values, list) else [] for values in lists]
    temperatures, shifts = numbers
    if numbers != lists or len(temperatures) != len(shifts) or not temperatures or min(temperatures) <= 0:
        raise _damaged(path, f'"{key[:80]}" has no temperatures above 0 with as many shifts')
    return Scaling(tuple(temperatures), tuple(shifts))


def _is_number(value: Any) -> bool:
    # An integer may be larger than any float: then it has no finite one either.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path} cannot be used", why, "run `k3dspark calibrate` again, or delete the file to schedule uncalibrated"
    )


class OnlineCalibration:
    """Scalings that follow the rounds of this engine, starting from a calibration or from nothing.

    Per setting and slot: a histogram of the logits of past trials and how many were accepted, which fades with every
    round. Slot k is a trial only where slot k−1 was accepted and slot k verified, so a round cut short is no
    evidence against what it never ran. T and b minimise the cross-entropy; a prior worth `PRIOR_WEIGHT` trials holds
    them where they started until there is evidence (spec §E, online variant).

    `observe` is called after a round, so what a round brought decides only about later ones.
    """

    BINS = 16
    REACH = 8.0  # bins cover logits of ±8; those beyond fall into the outermost
    DECAY = 0.999
    PRIOR_WEIGHT = 64.0
    STEEPEST = 8.0  # 1/T lies between 1/8 and 8
    FIT_EVERY = 64  # trials of the first slot

    def __init__(self, start: Scalings | None = None) -> None:
        self._start = start or Calibration()
        self._known: dict[str, _Counts] = {}

    def scaling(self, setting: str) -> Scaling:
        known = self._known.get(setting)
        return self._start.scaling(setting) if known is None else known.scaling

    def observe(
        self, settings: Sequence[str], logits: Floats, verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from a finished round: confidence logits [B, K], draft tokens verified and accepted per request."""
        for setting, row, ran, stood in zip(settings, logits, verified, accepted, strict=True):
            tried = min(ran, stood + 1, len(row))
            if tried:
                if setting not in self._known:
                    self._known[setting] = _Counts(self._start.scaling(setting), len(row))
                self._known[setting].add(row[:tried], stood)
        for setting in set(settings) & self._known.keys():
            self._known[setting].fit_when_due()


class _Counts:
    """Faded counts of one setting: per slot and logit bin, trials, sum of logits, and acceptances."""

    def __init__(self, start: Scaling, slots: int) -> None:
        self.scaling = start
        shape = (slots, OnlineCalibration.BINS)
        self._trials, self._sums, self._accepted = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._fresh = 0
        # σ(w g + b): the start as weight and shift, [K, 2].
        zero, one = (start(np.full(slots, g)) for g in (0.0, 1.0))
        self._start = np.stack([one - zero, zero], 1)
        self._now = self._start

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
        self._fresh += 1

    def fit_when_due(self) -> None:
        if self._fresh >= OnlineCalibration.FIT_EVERY:
            self._fresh = 0
            self._now = self._fit()
            self.scaling = Scaling(tuple((1 / self._now[:, 0]).tolist()), tuple(self._now[:, 1].tolist()))

    def _fit(self) -> Floats:
        """Weight and shift [K, 2] by Newton's method: 16 weighted points per slot, a convex loss."""
        total = self._trials.sum(1, keepdims=True)
        share = np.divide(self._trials, total, where=total > 0, out=np.zeros_like(self._trials))
        mean = np.divide(self._sums, self._trials, where=self._trials > 0, out=np.zeros_like(self._sums))
        features = np.stack([mean, np.ones_like(mean)], -1)  # [K, bins, 2]
        # The prior: trials with the logits seen so far, accepted exactly as often as the start says.
        prior = OnlineCalibration.PRIOR_WEIGHT * share
        trials = self._trials + prior
        accepted = self._accepted + prior * _sigmoid((features @ self._start[..., None])[..., 0])
        ridge = np.eye(2)  # one bin alone cannot tell a weight from a shift
        found = self._now
        for _ in range(4):
            chance = _sigmoid((features @ found[..., None])[..., 0])  # [K, bins]
            slope = ((trials * chance - accepted)[..., None] * features).sum(1) + (found - self._start)
            curve = np.einsum("kb,kbi,kbj->kij", trials * chance * (1 - chance), features, features) + ridge
            found = found - np.linalg.solve(curve, slope[..., None])[..., 0]
            steep = OnlineCalibration.STEEPEST
            found[:, 0] = found[:, 0].clip(1 / steep, steep)  # above 0: the order within a slot stays
            found[:, 1] = found[:, 1].clip(-OnlineCalibration.REACH, OnlineCalibration.REACH)
        return found


def _sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
