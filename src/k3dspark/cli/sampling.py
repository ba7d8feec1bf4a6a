"""From options to sampling parameters and a schedule: what contradicts itself is refused before a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3dspark.errors import BadInput

if TYPE_CHECKING:
    from k3dspark.decoding import SamplingParams, StepCosts
    from k3dspark.decoding.calibration import Calibration
    from k3dspark.decoding.scheduler_for import Schedule
    from k3dspark.embedded.pair import ModelPair
    from k3dspark.model.draft import K3DSparkModel

Verify = Literal["greedy", "token", "block"]
ScheduleName = Literal["full", "threshold", "cost"]


def verifier(verify: Verify | None, params: SamplingParams) -> Literal["token", "block"]:
    """The verifier that fits the sampling. Raises `BadInput` when the one asked for does not."""
    if verify == "greedy" and not params.greedy:
        raise BadInput(
            f"--verify greedy with --temperature {params.temperature:g}",
            "greedy verification keeps only the target's best token, so the output would not be sampled",
            "use --verify block or token, or --temperature 0",
        )
    return verify if verify in ("token", "block") else "block"


def check_truncation(params: SamplingParams) -> None:
    """Raise `BadInput` when a greedy request cuts its distribution: it was meant to be sampled."""
    if params.greedy and params.truncated:
        named = [
            o for o, on in (("--top-k", params.top_k), ("--top-p", params.top_p < 1), ("--min-p", params.min_p)) if on
        ]
        raise BadInput(
            f"{' and '.join(named)} without a temperature",
            "greedy decoding takes the best token, whatever is cut away below it",
            "add --temperature 1, or leave it out",
        )


def logit_biases(given: Sequence[str]) -> dict[int, float]:
    """ID:BIAS pairs as a mapping. Raises `BadInput`."""
    biases: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise BadInput(
                f"--logit-bias {text}", "it is not a token id and a number with a colon between", "for example 1234:-5"
            ) from error
    return biases


def schedule(name: ScheduleName | None, draft_length: int | None, threshold: float | None, online: bool) -> Schedule:
    """The schedule of these options. Raises `BadInput` when they contradict each other."""
    from k3dspark.decoding.scheduler_for import LEAST_SURVIVAL, Schedule

    if draft_length is not None and name is not None:
        raise BadInput(
            f"--draft-length {draft_length} with --schedule {name}",
            "a fixed length leaves nothing to schedule",
            "leave one of the two out",
        )
    if threshold is not None and name != "threshold":
        raise BadInput(
            f"--threshold {threshold:g} without --schedule threshold",
            "only that schedule compares survival with a threshold",
            "add --schedule threshold",
        )
    least = LEAST_SURVIVAL if threshold is None else threshold
    return Schedule("fixed" if draft_length is not None else name or "full", draft_length, least, online)


def check_costs(costs: Path | None, name: ScheduleName | None) -> None:
    """Raise `BadInput` for a file of costs that nothing would read."""
    if costs is not None and name != "cost":
        raise BadInput(f"--costs {costs} without --schedule cost", "nothing else reads costs", "add --schedule cost")


def calibration(directory: Path | None, draft: K3DSparkModel) -> Calibration | None:
    """What lies beside the draft (None: the embedded one); a calibration of other weights is said and not used."""
    from k3dspark.decoding.calibration import CALIBRATION_FILE, read_calibration
    from k3dspark.embedded.pair import EMBEDDED_DRAFT

    place = (directory or EMBEDDED_DRAFT) / CALIBRATION_FILE
    found = read_calibration(place.parent, draft)
    if found is None and draft.confidence_head is not None and place.exists():
        print(f"{place} was fitted for other weights: confidence is used as it is", file=sys.stderr)
    return found


def step_costs(path: Path, pair: ModelPair, requests: int = 1) -> StepCosts:
    """The costs in a file; measured for up to `requests` and written there when there is none. Raises `BadInput`."""
    from k3dspark.checkpoint.files import write_json
    from k3dspark.checkpoint.jsonfile import read_object
    from k3dspark.decoding.costs import StepCosts, measure

    if path.exists():
        return StepCosts.from_json(read_object(path))
    print(f"measuring step costs for {path}", file=sys.stderr)
    costs = measure(pair.target, pair.draft, requests)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, costs.as_json())
    except OSError as error:
        raise BadInput(f"cannot write {path}", str(error), "choose another place for the costs") from error
    return costs
