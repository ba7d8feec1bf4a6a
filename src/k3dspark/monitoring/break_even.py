"""The acceptance length from which on drafting pays: a round must bring more tokens than plain steps in its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from k3dspark.monitoring.figures import Figures


@dataclass(frozen=True)
class BreakEven:
    """`length` = round time / plain step time at the same load (Leviathan et al. 2023, §3.3, with measured costs).

    `basis`: how the plain step is known: "given" by the user, "measured" on a server without a draft, or "bound":
    only the draft's own share of the round is known, so the true figure is higher, since verifying a block costs at
    least as much as a plain step. `speed_up` is actual length over break-even length.
    """

    length: float
    basis: Literal["given", "measured", "bound"]
    round_seconds: float | None
    plain_seconds: float | None
    actual: float | None

    @property
    def speed_up(self) -> float | None:
        return self.actual / self.length if self.actual is not None else None


def break_even(
    figures: Figures,
    plain_seconds: float | None = None,
    plain: Figures | None = None,
    round_seconds: float | None = None,
) -> BreakEven | None:
    """The break-even length of these figures, from the best source there is; None where none is.

    `plain_seconds` is a plain step's time that the user gives, `plain` the figures of a server without a draft,
    `round_seconds` a round's time that the user gives where the engine does not tell it.
    """
    took = round_seconds if round_seconds is not None else figures.round_seconds
    if took:
        if plain_seconds:
            return BreakEven(took / plain_seconds, "given", took, plain_seconds, figures.acceptance_length)
        if plain is not None and plain.round_seconds:
            return BreakEven(
                took / plain.round_seconds, "measured", took, plain.round_seconds, figures.acceptance_length
            )
    if figures.draft_share is not None and figures.draft_share < 1:
        return BreakEven(1 / (1 - figures.draft_share), "bound", took, None, figures.acceptance_length)
    return None
