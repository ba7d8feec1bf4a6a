"""Confidence fitted to what is really accepted: rounds recorded, scaled slot by slot, judged on other prompts.

A draft's confidence is trained on the acceptance of token-level sampling at temperature 1. Under any other setting, and
above all greedily, σ(g) is not the chance that a token stands (spec §E). The door is `calibrate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.decoding.calibration import SCHEMA, UNCHANGED, Scaling, Setting, fingerprint, no_confidence_head
from k3dspark.decoding.engine import Engine
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.schedule import FullBlock, Load, Outcome, acceptance
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.protocol import Target
from k3dspark.training.reliability import Reliability, ece, reliability

Floats = NDArray[np.float64]

TEMPERATURES = np.geomspace(1 / 8, 8, 25)
SHIFTS = np.linspace(-6, 6, 49)
LEAST_ROUNDS = 50  # to fit and to judge: fewer say nothing
SIMULATIONS = 40


@dataclass(frozen=True)
class Rounds:
    """Whole blocks that were verified: confidence logits [N, K], tokens accepted [N], index of the prompt [N].

    Every round has a label for every slot ("at least k were accepted"), because no block was cut short.
    """

    logits: Floats
    accepted: NDArray[np.int64]
    prompt: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def slots(self) -> int:
        return int(self.logits.shape[1])

    def of(self, prompts: Sequence[int]) -> Rounds:
        """The rounds of these prompts."""
        chosen = np.isin(self.prompt, list(prompts))
        return Rounds(self.logits[chosen], self.accepted[chosen], self.prompt[chosen])

    def survived(self, slot: int) -> NDArray[np.bool_]:
        """Whether the token of a slot (from 0) and all before it were accepted, [N]."""
        return self.accepted > slot


class Recorder(FullBlock):
    """Verifies every block whole, and keeps the confidence and the outcome of each by request."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[tuple[list[float], int]]] = {}
        self._logits: list[list[float]] = []

    def lengths(self, confidence: torch.Tensor, load: Load) -> tuple[int, ...]:
        self._logits = confidence.tolist()
        return load.limits

    def observe(self, outcome: Outcome) -> None:
        rounds = zip(outcome.load.requests, self._logits, outcome.verified, outcome.accepted, strict=True)
        for request, logits, verified, accepted in rounds:
            if logits and verified == len(logits):  # the end of an answer leaves no room for a whole block
                self.rounds.setdefault(request, []).append((logits, accepted))


def record(
    target: Target,
    draft: K3DSparkModel,
    prompts: Sequence[Sequence[int]],
    params: Callable[[int], SamplingParams],
    batch: int = 8,
    on_prompt: Callable[[], None] | None = None,
) -> Rounds:
    """Answer all prompts (token ids) in full blocks, `batch` at once; `params(i)` are those of prompt i.

    `on_prompt` is called whenever an answer ends.
    """
    recorder = Recorder()
    engine = Engine(target, draft, recorder)
    prompt_of: dict[int, int] = {}
    waiting = list(enumerate(prompts))[::-1]
    done = 0
    while waiting or not engine.idle:
        while waiting and len(prompt_of) - done < batch:
            index, ids = waiting.pop()
            prompt_of[engine.submit(ids, params(index)).id] = index
        ended = [p.request for p in engine.step() if p.request.finished]
        done += len(ended)
        if on_prompt is not None:
            for _ in ended:
                on_prompt()
    rows = [(logits, n, prompt_of[r]) for r, rounds in recorder.rounds.items() for logits, n in rounds]
    return Rounds(
        np.array([logits for logits, _, _ in rows], dtype=np.float64).reshape(len(rows), draft.block_size),
        np.array([accepted for _, accepted, _ in rows], dtype=np.int64),
        np.array([prompt for _, _, prompt in rows], dtype=np.int64),
    )


def fit(rounds: Rounds) -> Scaling:
    """Sequential scaling (after DSpark's sequential temperature scaling): slot by slot, earlier slots frozen.

    T and b of slot k make the survival, the product of σ(g_i / T_i + b_i) up to k, the likeliest explanation of which
    rounds accepted at least k tokens. The likelihood is smooth where the ECE of so few rounds is not; a weak pull
    towards T = 1 and b = 0 decides where there is next to nothing to learn from.
    """
    before = np.ones(len(rounds))
    chosen = []
    for slot in range(rounds.slots):
        logits, outcome = rounds.logits[:, slot], rounds.survived(slot)
        best = _best(logits, before, outcome, TEMPERATURES, SHIFTS)
        step, width = TEMPERATURES[1] / TEMPERATURES[0], SHIFTS[1] - SHIFTS[0]
        fine = best[0] * step ** np.linspace(-1, 1, 9), best[1] + width * np.linspace(-1, 1, 9)
        best = _best(logits, before, outcome, fine[0].clip(1 / 8, 8), fine[1])
        before = before * acceptance(logits / best[0] + best[1])
        chosen.append(best)
    return Scaling(tuple(t for t, _ in chosen), tuple(b for _, b in chosen))


def _best(
    logits: Floats, before: Floats, outcome: NDArray[np.bool_], temperatures: Floats, shifts: Floats
) -> tuple[float, float]:
    """The pair from two grids with the least cross-entropy of before · σ(g / T + b)."""
    found = []
    for temperature in temperatures:
        survival = before[:, None] * acceptance(logits[:, None] / temperature + shifts)  # [N, shifts]
        survival = survival.clip(1e-12, 1 - 1e-12)
        loss = -np.log(np.where(outcome[:, None], survival, 1 - survival)).sum(0)
        loss += np.log(temperature) ** 2 + shifts**2 / 4
        at = int(loss.argmin())
        found.append((float(loss[at]), float(temperature), float(shifts[at])))
    _, temperature, shift = min(found)
    return temperature, shift


@dataclass(frozen=True)
class SlotFigures:
    """One slot before and after: of survival (all before it accepted, and it too) and of its own acceptance.

    `floor` is the ECE of survival that a perfectly calibrated head would show on so few rounds. The figures of its
    own acceptance are over rounds that accepted everything before it; None where there are none.
    """

    survival_before: Reliability
    survival_after: Reliability
    floor: float
    step_before: Reliability | None
    step_after: Reliability | None


@dataclass(frozen=True)
class Fitted:
    """A setting's scaling, fitted on the rounds of half of the prompts and judged on those of the other half."""

    setting: Setting
    scaling: Scaling
    fit_rounds: Rounds
    test_rounds: Rounds
    slots: tuple[SlotFigures, ...]


def judge(rounds: Rounds, scaling: Scaling, seed: int = 0) -> tuple[SlotFigures, ...]:
    """Figures of every slot on rounds that the scaling was not fitted on."""
    steps = [acceptance(scale(rounds.logits)) for scale in (UNCHANGED, scaling)]  # [N, K] each
    survivals = [step.cumprod(1) for step in steps]
    random = np.random.default_rng(seed)
    figures = []
    for slot in range(rounds.slots):
        outcome, reached = rounds.survived(slot), rounds.accepted >= slot
        before, after = (reliability(survival[:, slot], outcome) for survival in survivals)
        assert before is not None
        assert after is not None
        predicted = survivals[1][:, slot]
        floors = [ece(predicted, random.random(len(rounds)) < predicted) for _ in range(SIMULATIONS)]
        own = [reliability(step[reached, slot], outcome[reached]) for step in steps]
        figures.append(SlotFigures(before, after, float(np.mean(floors)), own[0], own[1]))
    return tuple(figures)


def split(prompts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of the prompts to fit on and of those to judge on: halves, by a hash, whatever order they came in."""
    order = sorted(range(len(prompts)), key=lambda i: hashlib.sha256(prompts[i].encode()).digest())
    return sorted(order[::2]), sorted(order[1::2])


def calibrate(
    pair: ModelPair,
    prompts: Sequence[str],
    setting: Setting,
    *,
    max_new_tokens: int = 128,
    batch: int = 8,
    seed: int = 0,
    raw: bool = False,
    on_prompt: Callable[[], None] | None = None,
) -> Fitted:
    """Answer the prompts under a setting, fit on half of them, judge on the other half. Raises `BadInput`."""
    if pair.draft is None or pair.draft.confidence_head is None:
        raise no_confidence_head()
    ids = [pair.raw_ids(text) if raw else pair.chat_ids(text) for text in prompts]
    rounds = record(
        pair.target,
        pair.draft,
        ids,
        lambda i: setting.params(max_new_tokens=max_new_tokens, stop_token_ids=pair.stop_ids, seed=seed + i),
        batch,
        on_prompt,
    )
    fit_rounds, test_rounds = (rounds.of(chosen) for chosen in split(prompts))
    if min(len(fit_rounds), len(test_rounds)) < LEAST_ROUNDS:
        raise BadInput(
            f"{len(prompts)} prompts gave {len(fit_rounds)} rounds to fit on and {len(test_rounds)} to judge on",
            f"under {LEAST_ROUNDS} of each, nothing can be told from chance",
            "give more prompts or more --max-new-tokens",
        )
    scaling = fit(fit_rounds)
    return Fitted(setting, scaling, fit_rounds, test_rounds, judge(test_rounds, scaling))


def save(path: Path, draft: K3DSparkModel, fitted: Fitted) -> None:
    """Put a setting into the calibration at `path`, atomically. Others fitted for the same draft stay.

    A file that is damaged, or that was fitted for other weights, is replaced. Raises `BadInput` when it cannot be
    written.
    """
    name = fingerprint(draft)
    settings: dict[str, Any] = {}
    with suppress(BadInput):  # damaged, or not there
        content = read_object(path)
        if content.get("schema") == SCHEMA and content.get("draft") == name:
            settings = dict(content.get("settings") or {})
    settings[fitted.setting.key] = {
        "temperatures": [round(t, 6) for t in fitted.scaling.temperatures],
        "shifts": [round(b, 6) for b in fitted.scaling.shifts],
        "rounds": {"fit": len(fitted.fit_rounds), "test": len(fitted.test_rounds)},
        "survival_ece": {
            "before": [round(s.survival_before.ece, 4) for s in fitted.slots],
            "after": [round(s.survival_after.ece, 4) for s in fitted.slots],
            "floor": [round(s.floor, 4) for s in fitted.slots],
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema": SCHEMA, "draft": name, "settings": settings})
    except OSError as error:
        raise BadInput(
            f"cannot write {path}", str(error), "pass --out FILE, and put the file beside the draft yourself"
        ) from error


def as_json(fitted: Fitted) -> dict[str, Any]:
    """Everything about one setting, for `--json`."""
    return {
        "temperatures": list(fitted.scaling.temperatures),
        "shifts": list(fitted.scaling.shifts),
        "rounds": {"fit": len(fitted.fit_rounds), "test": len(fitted.test_rounds)},
        "prompts": {
            "fit": len(np.unique(fitted.fit_rounds.prompt)),
            "test": len(np.unique(fitted.test_rounds.prompt)),
        },
        "slots": [
            {
                "survival": {
                    "before": asdict(slot.survival_before), "after": asdict(slot.survival_after), "floor": slot.floor,
                },
                "acceptance": {
                    "before": slot.step_before and asdict(slot.step_before),
                    "after": slot.step_after and asdict(slot.step_after),
                },
            }
            for slot in fitted.slots
        ],
    }  # fmt: skip
