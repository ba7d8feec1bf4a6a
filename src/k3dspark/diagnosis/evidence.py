"""What a diagnosis from metrics is made of, read from the documents that `k3dspark monitor --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3dspark.diagnosis.observation import Observation
from k3dspark.errors import BadInput

# Mixed short prompts with the published K3 drafts: 2.98 (0–16K tokens) and 3.3 were reported.
USUAL_LENGTH = 3.0


@dataclass(frozen=True)
class Expectation:
    """What the draft should do here: the block it was trained for, and the acceptance length on this workload."""

    block: int = 7
    length: float = USUAL_LENGTH

    @property
    def conditional(self) -> float:
        """The acceptance a, the same at every slot, that gives this length: a + a² + … + a^block = length − 1."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if sum(middle**slot for slot in range(1, self.block + 1)) < self.length - 1:
                low = middle
            else:
                high = middle
        return (low + high) / 2


@dataclass(frozen=True)
class RankEvidence:
    """One rank's part. `error` is not stored: it follows from slots and rounds."""

    name: str
    rounds: float | None
    length: float
    slots: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """One model's figures; what is not known is None or empty. `slots[k]`: share of rounds that kept slot k+1."""

    model: str
    rounds: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    length: float | None = None
    slots: tuple[float, ...] = ()
    proposals: float | None = None
    tokens: float | None = None
    break_even: float | None = None
    break_even_basis: str = ""
    ranks: tuple[RankEvidence, ...] = ()
    observations: tuple[Observation, ...] = ()
    slots_add_up: bool = True


def from_document(document: Mapping[str, Any], observations: Sequence[Observation] = ()) -> list[Evidence]:
    """Evidence of each model in a monitor's document (format 1). Raises `BadInput` on another format."""
    if document.get("format") != 1 or not isinstance(document.get("models"), list):
        raise BadInput(
            "this is no document of a monitor",
            f"its format is {document.get('format')!r}",
            "use k3dspark monitor --json",
        )
    try:
        return [_model(entry, tuple(observations)) for entry in document["models"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            "a document of a monitor is damaged", f"{type(error).__name__}: {error}", "record it again"
        ) from error


def _model(entry: Mapping[str, Any], observations: tuple[Observation, ...]) -> Evidence:
    even = entry.get("break_even") or {}
    return Evidence(
        model=entry["model"],
        rounds=entry["rounds"],
        drafted=entry["drafted"],
        accepted=entry["accepted"],
        length=entry["acceptance_length"],
        slots=tuple(float(share) for share in entry["slots"]),
        proposals=entry["proposals_per_round"],
        tokens=entry["generated"] if entry["generated"] is not None else entry["tokens_per_second"],
        break_even=even.get("length"),
        break_even_basis=even.get("basis", ""),
        ranks=tuple(
            RankEvidence(
                f"{rank['source']} rank {rank['rank'] or '0'}",
                rank["rounds"],
                rank["acceptance_length"],
                tuple(float(share) for share in rank["slots"]),
            )
            for rank in entry["ranks"]
            if rank["acceptance_length"] is not None
        ),
        observations=observations,
        slots_add_up="slots_do_not_add_up" not in entry["notes"],
    )
