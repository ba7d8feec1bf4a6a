"""The scheduler that a user asks for by name, with everything it needs: calibration, and costs measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3dspark.decoding.calibration import Calibration, OnlineCalibration, Scalings, no_confidence_head
from k3dspark.decoding.costs import StepCosts, measure
from k3dspark.decoding.schedule import CostAware, FixedLength, FullBlock, Scheduler, Threshold
from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.protocol import Target

LEAST_SURVIVAL = 0.1  # a row more costs little beside a round, so only hopeless slots are left out
STARTUP_REPEATS = 5


@dataclass(frozen=True)
class Schedule:
    """How many draft tokens a round verifies: `full` blocks, `fixed` at `length`, by `threshold` or by `cost`.

    `least` is the survival a slot needs under `threshold`. `online` lets the calibration follow the rounds.
    Raises `BadInput` on combinations that mean nothing.
    """

    kind: Literal["full", "fixed", "threshold", "cost"] = "full"
    length: int | None = None
    least: float = LEAST_SURVIVAL
    online: bool = False

    def __post_init__(self) -> None:
        if (self.kind == "fixed") != (self.length is not None):
            raise BadInput(
                f"a draft length of {self.length} with the {self.kind} schedule",
                "a length belongs to the fixed schedule, and only to it",
                "pass --draft-length N alone, or another --schedule without it",
            )
        if self.online and not self.reads_confidence:
            raise BadInput(
                f"online calibration with the {self.kind} schedule",
                "this schedule does not read the confidence head",
                "choose --schedule threshold or cost, or leave the calibration out",
            )

    @property
    def reads_confidence(self) -> bool:
        return self.kind in ("threshold", "cost")


def scheduler_for(
    schedule: Schedule,
    target: Target,
    draft: K3DSparkModel,
    *,
    calibration: Calibration | None = None,
    costs: StepCosts | None = None,
    exact: bool = False,
) -> Scheduler:
    """The scheduler of a request stream. Without `costs`, the cost-aware one measures them now, in a few seconds.

    `exact` keeps everything out of a request's lengths that other requests bring. Raises `BadInput` for a draft that
    cannot be scheduled so.
    """
    if schedule.length is not None:
        if not 1 <= schedule.length <= draft.block_size:
            raise BadInput(
                f"the draft length is {schedule.length}",
                f"this draft proposes {draft.block_size} tokens at a time",
                f"pass 1 to {draft.block_size}, or --no-draft for plain decoding",
            )
        return FixedLength(schedule.length)
    if not schedule.reads_confidence:
        return FullBlock()
    if draft.confidence_head is None:
        raise no_confidence_head()
    if schedule.online and exact:
        raise BadInput(
            "online calibration with exact decoding",
            "it learns from every request, so the tokens of a sampled one would depend on its company",
            "leave one of the two out",
        )
    scalings: Scalings | None = OnlineCalibration(calibration) if schedule.online else calibration
    if schedule.kind == "threshold":
        return Threshold(schedule.least, calibration=scalings)
    if costs is None:
        costs = measure(target, draft, repeats=STARTUP_REPEATS)
    return CostAware(costs, calibration=scalings, alone=exact)
