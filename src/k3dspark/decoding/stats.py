"""Counters and times of decoding, added up over rounds and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """What one request (or many, after `+`) did; seconds are wall time on the host's clock.

    Prefill ends with the first token, which belongs to no round (spec F.8). Every later round commits `accepted`
    draft tokens and one token more, so `committed == rounds + accepted` always: a round cut by a stop token inside its
    accepted prefix counts the stop token as that one more.
    """

    rounds: int = 0
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # of those, committed
    verified_by_slot: list[int] = field(default_factory=list)
    reached_by_slot: list[int] = field(default_factory=list)  # verified, and every slot before it accepted
    accepted_by_slot: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, rows that an earlier request had left
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0

    @classmethod
    def with_slots(cls, slots: int) -> DecodeStats:
        """Empty statistics that report every slot of a block, reached or not."""
        return cls(verified_by_slot=[0] * slots, reached_by_slot=[0] * slots, accepted_by_slot=[0] * slots)

    @property
    def committed(self) -> int:
        """Tokens committed by rounds; the first token of each prefill is not among them."""
        return self.rounds + self.accepted

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per round, the bonus token included; 1.0 before the first round."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_slot_acceptance(self) -> tuple[float, ...]:
        """Share of all rounds whose slot k was committed. Their sum is `acceptance_length - 1`."""
        return tuple(n / self.rounds if self.rounds else 0.0 for n in self.accepted_by_slot)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Slot k committed, given that it was verified and slot k−1 committed (spec F.8)."""
        pairs = zip(self.accepted_by_slot, self.reached_by_slot, strict=True)
        return tuple(accepted / reached if reached else 0.0 for accepted, reached in pairs)

    @property
    def decode_seconds(self) -> float:
        """Time of all rounds; prefill excluded."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens committed by rounds per second of rounds: prefill and its first token are excluded from both."""
        return self.committed / self.decode_seconds if self.decode_seconds else 0.0

    def add_round(self, verified: int, accepted: int) -> None:
        """Count one round that verified `verified` draft tokens and committed `accepted` of them."""
        self.rounds += 1
        self.drafted += verified
        self.accepted += accepted
        for counts, slots in (
            (self.verified_by_slot, verified),
            (self.reached_by_slot, min(verified, accepted + 1)),
            (self.accepted_by_slot, accepted),
        ):
            counts += [0] * (verified - len(counts))
            for slot in range(slots):
                counts[slot] += 1

    def add_times(self, draft: float, verify: float, host: float) -> None:
        """Add the seconds of one round. In a batch, every request that took part waits for the whole round."""
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.host_seconds += host

    def __add__(self, other: DecodeStats) -> DecodeStats:
        """Pooled counters: sums over sums, never a mean of ratios."""
        return DecodeStats(
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            verified_by_slot=_add(self.verified_by_slot, other.verified_by_slot),
            reached_by_slot=_add(self.reached_by_slot, other.reached_by_slot),
            accepted_by_slot=_add(self.accepted_by_slot, other.accepted_by_slot),
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            new_tokens=self.new_tokens + other.new_tokens,
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            draft_seconds=self.draft_seconds + other.draft_seconds,
            verify_seconds=self.verify_seconds + other.verify_seconds,
            host_seconds=self.host_seconds + other.host_seconds,
        )


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    size = max(len(left), len(right))
    padded = [[*values, *[0] * (size - len(values))] for values in (left, right)]
    return [a + b for a, b in zip(*padded, strict=True)]
