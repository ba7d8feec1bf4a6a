"""Recording rules: the families of every engine under one set of names, ready for alerts and dashboards.

Names follow Prometheus' level:metric:operation. Labels: `service` (from the scrape configuration), `model_name`,
and where it matters `instance`, `rank` or `position` (0 is the first slot).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = "5m"
# Below 30 rounds in a window a share is noise.
LEAST_ROUNDS_PER_SECOND: Final = 0.1
# A slot that is hardly ever reached says nothing about the one after it.
LEAST_REACHED: Final = 0.05

_RANK: Final = "service, model_name, instance, rank"
_MODEL: Final = "service, model_name"


@dataclass(frozen=True)
class Deployment:
    """What the rules are for. `expected` None compares with the past week; without a plain step no break-even."""

    service: str = "dspark"
    engines: tuple[str, ...] = ()
    npu_exporters: tuple[str, ...] = ()
    dcgm_exporters: tuple[str, ...] = ()
    block: int = 7
    expected: float | None = None
    plain_step_seconds: float | None = None


@dataclass(frozen=True)
class Recording:
    record: str
    expr: str
    labels: dict[str, str] = field(default_factory=dict)


def recordings(deployment: Deployment) -> list[Recording]:
    """In the order in which they must be evaluated: each uses only those before it."""
    rules = [*_counts(), *_acceptance(deployment), *_slots(deployment), *_load(), *_times()]
    if deployment.plain_step_seconds is not None:
        rules.append(
            Recording("dspark:break_even_length:5m", f"dspark:round_seconds:5m / {deployment.plain_step_seconds:.6g}")
        )
    return rules


def _any(*expressions: str) -> str:
    return "\nor\n".join(expressions)


def _rank_rate(name: str, label: str, by: str = _RANK) -> str:
    return f'sum by ({by}) (label_replace(rate({name}[{WINDOW}]), "rank", "$1", "{label}", "(.*)"))'


def _sglang(name: str, keep: str = "") -> str:
    """A gauge of each data-parallel rank; tensor ranks repeat it."""
    return f'max by ({_RANK}) (label_replace(sglang:{name}{keep}, "rank", "$1", "dp_rank", "(.*)"))'


def _counts() -> list[Recording]:
    def three(ours: str, name: str) -> str:
        return _any(
            _rank_rate(f"vllm:spec_decode_num_{name}_total", "engine"),
            _rank_rate(f"k3dspark:spec_decode_num_{ours}_total", "engine"),
            _rank_rate(f"tokenspeed:spec_decode_num_{name}_total", "engine"),
        )

    # SGLang has no counters: rounds a second are tokens a second over tokens a round.
    gauged = f"{_sglang('gen_throughput')} / ({_sglang('spec_accept_length')} > 0)"
    per_slot = f"{_RANK}, position"
    return [
        Recording("dspark:rounds:rate5m", _any(three("rounds", "drafts"), gauged)),
        Recording(
            "dspark:drafted:rate5m",
            _any(
                three("draft_tokens", "draft_tokens"),
                # The verify width holds the anchor.
                f"{gauged} * ({_sglang('spec_num_draft_tokens')} - 1)",
            ),
        ),
        Recording(
            "dspark:accepted:rate5m",
            _any(
                three("accepted_tokens", "accepted_tokens"),
                f"{_sglang('gen_throughput')} - {gauged}",
            ),
        ),
        Recording(
            "dspark:accepted_per_slot:rate5m",
            _any(
                _rank_rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "engine", per_slot),
                _rank_rate("k3dspark:spec_decode_num_accepted_tokens_per_pos_total", "engine", per_slot),
            ),
        ),
    ]


def _acceptance(deployment: Deployment) -> list[Recording]:
    enough = f"> {LEAST_ROUNDS_PER_SECOND:g}"
    if deployment.expected is not None:
        expected = f"dspark:acceptance_length:5m * 0 + {deployment.expected:.6g}"
    else:
        # The hour just past is left out, so that a fresh fall does not lower what it is measured by.
        expected = "avg_over_time(dspark:acceptance_length:5m[7d] offset 1h)"
    return [
        Recording("dspark:rank_acceptance_length:5m", f"1 + dspark:accepted:rate5m / (dspark:rounds:rate5m {enough})"),
        Recording(
            "dspark:acceptance_length:5m",
            f"1 + sum by ({_MODEL}) (dspark:accepted:rate5m) / (sum by ({_MODEL}) (dspark:rounds:rate5m) {enough})",
        ),
        Recording(
            "dspark:acceptance_rate:5m",
            f"sum by ({_MODEL}) (dspark:accepted:rate5m) / (sum by ({_MODEL}) (dspark:drafted:rate5m) > 0)",
        ),
        Recording("dspark:expected_length", expected),
    ]


def _slots(deployment: Deployment) -> list[Recording]:
    enough = f"> {LEAST_ROUNDS_PER_SECOND:g}"
    counts = [
        f"count by ({_MODEL}, position) ({engine}:spec_decode_num_accepted_tokens_per_pos_total)"
        for engine in ("vllm", "k3dspark")
    ]
    rules = [
        Recording(
            "dspark:slot_acceptance:5m",
            f"sum by ({_MODEL}, position) (dspark:accepted_per_slot:rate5m)\n"
            f"/ on ({_MODEL}) group_left () (sum by ({_MODEL}) (dspark:rounds:rate5m) {enough})",
        ),
        Recording("dspark:slots:count", f"count by ({_MODEL}) ({_any(*counts)})"),
    ]
    for slot in range(1, deployment.block):
        before = f'(dspark:slot_acceptance:5m{{position="{slot - 1}"}} > {LEAST_REACHED:g})'
        rules.append(
            Recording(
                "dspark:slot_conditional:5m",
                f'dspark:slot_acceptance:5m{{position="{slot}"}} / ignoring (position) {before}',
                {"position": str(slot)},
            )
        )
    return rules


def _load() -> list[Recording]:
    def gauge(name: str, sglang: str) -> str:
        named = [f"sum by ({_MODEL}) ({engine}:{name})" for engine in ("vllm", "k3dspark", "tokenspeed")]
        return _any(*named, f"sum by ({_MODEL}) ({_sglang(sglang)})")

    tokens = [
        f"sum by ({_MODEL}) (rate({engine}:generation_tokens_total[{WINDOW}]))"
        for engine in ("vllm", "k3dspark", "tokenspeed", "sglang")
    ]
    return [
        Recording("dspark:tokens_per_second:5m", _any(*tokens)),
        Recording("dspark:requests_running", gauge("num_requests_running", "num_running_reqs")),
        Recording("dspark:requests_waiting", gauge("num_requests_waiting", "num_queue_reqs")),
        # −1 is a chip that cannot tell; it must not pull the average down.
        Recording(
            "dspark:device_utilisation",
            _any(
                "avg by (service) (npu_chip_info_utilization >= 0) / 100",
                "avg by (service) (DCGM_FI_DEV_GPU_UTIL <= 100) / 100",
            ),
        ),
    ]


def _times() -> list[Recording]:
    def mean(name: str) -> str:
        total, count = (f"sum by ({_MODEL}) (rate({name}_{part}[{WINDOW}]))" for part in ("sum", "count"))
        return f"{total} / ({count} > 0)"

    def share(name: str, quantile: float) -> str:
        names = (f"{engine}:{name}" for engine in ("vllm", "k3dspark", "sglang", "tokenspeed"))
        return _any(
            *(
                f"histogram_quantile({quantile:g}, sum by ({_MODEL}, le) (rate({name}_bucket[{WINDOW}])))"
                for name in names
            )
        )

    between = "inter_token_latency_seconds"
    ours = f"sum by ({_MODEL}) (rate(k3dspark:{between}_sum[{WINDOW}]))"
    return [
        # What vLLM calls the time between tokens is a round's; of ours and SGLang's, a round's tokens each get a share.
        Recording(
            "dspark:round_seconds:5m",
            _any(
                mean(f"vllm:{between}"),
                f"{ours} / (sum by ({_MODEL}) (rate(k3dspark:spec_decode_num_rounds_total[{WINDOW}])) > 0)",
                f"({mean(f'sglang:{between}')}) * on ({_MODEL}) dspark:acceptance_length:5m",
            ),
        ),
        Recording("dspark:first_token_seconds:p90_5m", share("time_to_first_token_seconds", 0.9)),
        Recording("dspark:request_seconds:p90_5m", share("e2e_request_latency_seconds", 0.9)),
    ]
