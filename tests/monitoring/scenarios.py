"""Recorded situations as Prometheus series, one for each alert, and a healthy hour.

Values are promtool's: `0+60x40` begins at 0 and adds 60 at each of 40 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MINUTES: Final = 40
HEALTHY_SLOTS: Final = (0.78, 0.58, 0.43, 0.32, 0.24, 0.18, 0.13)


@dataclass(frozen=True)
class Scenario:
    """`fires`: the one alert that must; empty when none may."""

    name: str
    fires: str
    series: dict[str, str] = field(default_factory=dict)


def counter(per_minute: float) -> str:
    return f"0+{per_minute:g}x{MINUTES}"


def gauge(value: float) -> str:
    return f"{value:g}+0x{MINUTES}"


def vllm(
    slots: Sequence[float] = HEALTHY_SLOTS,
    rounds: float = 6000,
    engine: str = "0",
    accepted: float | None = None,
    round_seconds: float = 0.04,
) -> dict[str, str]:
    """A vLLM engine: rounds a minute, the share of them that accepts each slot, and the time of a round."""
    labels = f'instance="n1:8000",service="dspark",job="dspark-engines",model_name="k3",engine="{engine}"'
    kept = sum(slots) * rounds if accepted is None else accepted * rounds
    series = {
        f"vllm:spec_decode_num_drafts_total{{{labels}}}": counter(rounds),
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}": counter(rounds * len(slots)),
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}": counter(kept),
        f"vllm:generation_tokens_total{{{labels}}}": counter(kept + rounds),
        f"vllm:num_requests_running{{{labels}}}": gauge(8),
        f"vllm:num_requests_waiting{{{labels}}}": gauge(0),
        f"vllm:inter_token_latency_seconds_count{{{labels}}}": counter(rounds),
        f"vllm:inter_token_latency_seconds_sum{{{labels}}}": counter(rounds * round_seconds),
    }
    for position, share in enumerate(slots):
        name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}}'
        series[name] = counter(share * rounds)
    return series


def sglang(length: float, engine_rank: str = "0", throughput: float = 400, width: int = 8) -> dict[str, str]:
    series: dict[str, str] = {}
    for tp_rank in ("0", "1"):
        labels = (
            f'instance="n3:30000",service="dspark",job="dspark-engines",model_name="k3",'
            f'dp_rank="{engine_rank}",tp_rank="{tp_rank}"'
        )
        series |= {
            f"sglang:spec_accept_length{{{labels}}}": gauge(length),
            f"sglang:gen_throughput{{{labels}}}": gauge(throughput),
            f"sglang:spec_num_draft_tokens{{{labels}}}": gauge(width),
            f"sglang:num_queue_reqs{{{labels}}}": gauge(0),
        }
    labels = 'instance="n3:30000",service="dspark",job="dspark-engines",model_name="k3"'
    return series | {f"sglang:generation_tokens_total{{{labels}}}": counter(throughput * 60)}


def up(instance: str = "n1:8000", job: str = "dspark-engines", value: float = 1) -> dict[str, str]:
    return {f'up{{instance="{instance}",service="dspark",job="{job}"}}': gauge(value)}


def npus(utilisation: Sequence[float], health: Sequence[float] = ()) -> dict[str, str]:
    labels = [f'instance="n1:8082",service="dspark",job="dspark-npu",id="{chip}"' for chip in range(len(utilisation))]
    return {
        **{f"npu_chip_info_utilization{{{at}}}": gauge(value) for at, value in zip(labels, utilisation, strict=True)},
        **{f"npu_chip_info_health_status{{{at}}}": gauge(value) for at, value in zip(labels, health, strict=False)},
    }


_WAITING: Final = (
    'vllm:num_requests_waiting{instance="n1:8000",service="dspark",job="dspark-engines",model_name="k3",engine="0"}'
)
_HEALTHY: Final = vllm() | up() | npus([80, 75, -1], [1, 1, 1])
_LOW: Final = (0.45, 0.22, 0.11, 0.06, 0.03, 0.015, 0.007)
_ONE_RANK_COUNTED: Final = {
    name: value for name, value in vllm(engine="1").items() if "per_pos" not in name
}  # a rank whose slots nobody counts

SCENARIOS: Final = (
    Scenario("healthy vLLM", "", _HEALTHY),
    Scenario("healthy SGLang, two ranks", "", sglang(3.6) | sglang(3.5, "1") | up("n3:30000")),
    Scenario("idle at night", "", vllm(rounds=0) | up() | npus([0, 0], [1, 1])),
    Scenario("one accepted token in a thousand", "DSparkNothingAccepted", vllm([0.001] + [0.0] * 6) | up()),
    Scenario("SGLang at exactly one", "DSparkNothingAccepted", sglang(1.0) | up("n3:30000")),
    Scenario("all slots low", "DSparkAcceptanceLow", vllm(_LOW, round_seconds=0.03) | up()),
    Scenario("a slow round", "DSparkBelowBreakEven", vllm(round_seconds=0.09) | up()),
    Scenario(
        "tokens without rounds", "DSparkNotDrafting",
        {name: value for name, value in vllm().items() if "spec_decode" not in name} | up(),
    ),
    Scenario("SGLang without speculation", "DSparkNotDrafting", sglang(0.0) | up("n3:30000")),
    Scenario(
        "one rank of two accepts little", "DSparkRanksDiverge",
        vllm(rounds=9000) | vllm(_LOW, 3000, engine="1", round_seconds=0.03) | up(),
    ),
    Scenario(
        "slot 1 fine, then nothing", "DSparkCollapseAfterFirstSlot",
        vllm([0.85, 0.15, 0.02, 0.0, 0.0, 0.0, 0.0], round_seconds=0.03) | up(),
    ),
    Scenario(
        "slot 5 was never trained", "DSparkLateSlotCollapse",
        vllm([0.85, 0.70, 0.58, 0.48, 0.02, 0.01, 0.0]) | up(),
    ),
    Scenario("six proposals", "DSparkFewerSlots", vllm(HEALTHY_SLOTS[:6]) | up()),
    Scenario("eight proposals", "DSparkMoreSlots", vllm((*HEALTHY_SLOTS, 0.09)) | up()),
    Scenario("slots of one rank only", "DSparkSlotsDoNotAddUp", vllm() | _ONE_RANK_COUNTED | up()),
    Scenario("an exporter is gone", "DSparkScrapeFailing", _HEALTHY | up("n1:8082", "dspark-npu", 0)),
    Scenario("statistics are off", "DSparkFamilyMissing", up("n2:8000") | _HEALTHY),
    Scenario(
        "a restart ten minutes before", "DSparkEngineRestarted",
        {
            name: value.replace("x40", "x25") + " " + value.replace("x40", "x14") if value.startswith("0+") else value
            for name, value in _HEALTHY.items()
        },
    ),
    Scenario(
        "a queue before idle devices", "DSparkIdleWhileQueued", _HEALTHY | npus([9, 4, -1]) | {_WAITING: gauge(12)},
    ),
    Scenario("a queue before busy devices", "", _HEALTHY | {_WAITING: gauge(12)}),
    Scenario("an unhealthy chip", "DSparkDeviceFault", _HEALTHY | npus([80, 75, -1], [1, 0, 1])),
    Scenario("a chip that cannot tell its health", "", _HEALTHY | npus([80, 75, -1], [1, 1, -1])),
)  # fmt: skip
