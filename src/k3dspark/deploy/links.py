"""What must travel between target and draft, how long it takes, and what speed-up that leaves. Pure arithmetic.

Every verified token brings its taps' hidden states: 5 × 7168 × 2 bytes for Kimi K3. In one round `rows` tokens are
verified (requests × (block + 1)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from k3dspark.checkpoint.fields import value_of
from k3dspark.checkpoint.header import BITS
from k3dspark.checkpoint.inventory import DTYPES

# A transfer may take this share of a plain decoding step before the check warns, and fails.
WARN_SHARE: Final = 0.05
FAIL_SHARE: Final = 0.5


@dataclass(frozen=True)
class Load:
    """The traffic of a deployment. `step_ms` is one decoding step of the target without a draft."""

    hidden_bytes: int
    rows: int
    rounds_per_second: float
    step_ms: float
    block: int

    @property
    def round_bytes(self) -> int:
        """Hidden states of one round."""
        return self.hidden_bytes * self.rows

    @property
    def bytes_per_second(self) -> float:
        return self.round_bytes * self.rounds_per_second


@dataclass(frozen=True)
class Bound:
    """What a bandwidth makes of a load."""

    transfer_ms: float
    share_of_step: float
    link_share: float
    speed_up: float
    speed_up_without_link: float


def load_of(config: Mapping[str, Any], requests: int, step_ms: float) -> Load:
    """The load of `requests` at once under a draft's config. One round is taken to last one step: the best case."""
    each = BITS[DTYPES[value_of(config, "torch_dtype") or "bfloat16"]] // 8
    block = int(value_of(config, "block_size"))
    hidden = len(config["target_layer_ids"]) * int(config["target_hidden_size"]) * each
    return Load(hidden, requests * (block + 1), 1000.0 / step_ms, step_ms, block)


def bound(load: Load, bytes_per_second: float, latency_ms: float = 0.0) -> Bound:
    """The most that speculation can gain over a link of this bandwidth, one-way latency added.

    A round yields at most block + 1 tokens and lasts at least one step plus the transfer, so
    speed-up ≤ (block + 1) / (1 + transfer / step). Drafting and wider verification only lower it.
    """
    transfer_ms = load.round_bytes / bytes_per_second * 1000.0 + latency_ms
    share = transfer_ms / load.step_ms
    most = float(load.block + 1)
    return Bound(transfer_ms, share, load.bytes_per_second / bytes_per_second, most / (1.0 + share), most)


def needed_bytes_per_second(load: Load, share: float = WARN_SHARE) -> float:
    """The bandwidth at which a transfer takes this share of a step."""
    return load.round_bytes / (load.step_ms / 1000.0 * share)
