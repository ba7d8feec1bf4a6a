"""Alert rules. Each tells one thing; the general one keeps quiet where a special one explains the same fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from k3dspark.monitoring.rules import Deployment

_ON: Final = "on (service, model_name)"
ENGINES_JOB: Final = "dspark-engines"


@dataclass(frozen=True)
class Alert:
    """One rule; its runbook entry has the same name."""

    name: str
    severity: Literal["critical", "warning", "info"]
    wait: str
    expr: str
    summary: str


def alerts(deployment: Deployment) -> list[Alert]:
    rules = [*_acceptance(), *_slots(deployment), *_engine(), *_devices()]
    return (
        rules if deployment.plain_step_seconds is not None else [r for r in rules if r.name != "DSparkBelowBreakEven"]
    )


_NOTHING: Final = "dspark:acceptance_length:5m < 1.02"
_COLLAPSE: Final = (
    f'dspark:slot_conditional:5m{{position="1"}} < 0.35\nand {_ON} dspark:slot_acceptance:5m{{position="0"}} > 0.5'
)
_LATE: Final = (
    f'min by (service, model_name) (dspark:slot_conditional:5m{{position!="1"}}) < 0.25\n'
    f'and {_ON} dspark:slot_conditional:5m{{position="1"}} > 0.5'
)


def _acceptance() -> list[Alert]:
    return [
        Alert(
            "DSparkNothingAccepted", "critical", "5m", _NOTHING,
            "{{ $labels.model_name }}: acceptance length {{ $value | printf \"%.3f\" }}, no draft token is accepted",
        ),
        Alert(
            "DSparkAcceptanceLow", "warning", "15m",
            "dspark:acceptance_length:5m - 1 < 0.7 * (dspark:expected_length - 1)\n"
            f"unless {_ON} ({_NOTHING})\nunless {_ON} ({_COLLAPSE})\nunless {_ON} ({_LATE})",
            "{{ $labels.model_name }}: {{ $value | printf \"%.2f\" }} draft tokens accepted a round, far too few",
        ),
        Alert(
            "DSparkBelowBreakEven", "warning", "15m",
            f"dspark:acceptance_length:5m < dspark:break_even_length:5m\nunless {_ON} ({_NOTHING})",
            "{{ $labels.model_name }}: acceptance length {{ $value | printf \"%.2f\" }} does not pay for its rounds",
        ),
        Alert(
            "DSparkNotDrafting", "warning", "10m",
            f"dspark:tokens_per_second:5m > 1\nunless {_ON} sum by (service, model_name) (dspark:rounds:rate5m) > 0",
            "{{ $labels.model_name }}: {{ $value | printf \"%.0f\" }} tokens a second and not one drafting round",
        ),
        Alert(
            "DSparkRanksDiverge", "warning", "15m",
            "max by (service, model_name) (dspark:rank_acceptance_length:5m)\n"
            "- min by (service, model_name) (dspark:rank_acceptance_length:5m)\n"
            "> 0.3 * (avg by (service, model_name) (dspark:rank_acceptance_length:5m) - 1) + 0.1",
            "{{ $labels.model_name }}: acceptance lengths of ranks lie {{ $value | printf \"%.2f\" }} apart",
        ),
    ]  # fmt: skip


def _slots(deployment: Deployment) -> list[Alert]:
    block = deployment.block
    return [
        Alert(
            "DSparkCollapseAfterFirstSlot", "warning", "10m", _COLLAPSE,
            "{{ $labels.model_name }}: the first slot is accepted, of the second only {{ $value | printf \"%.2f\" }}",
        ),
        Alert(
            "DSparkLateSlotCollapse", "warning", "10m", _LATE,
            "{{ $labels.model_name }}: a later slot falls to {{ $value | printf \"%.2f\" }} of the one before it",
        ),
        Alert(
            "DSparkFewerSlots", "warning", "15m", f"dspark:slots:count < {block}",
            f"{{{{ $labels.model_name }}}}: {{{{ $value }}}} slots a round, but the draft was trained for {block}",
        ),
        Alert(
            "DSparkMoreSlots", "warning", "15m", f"dspark:slots:count > {block}",
            f"{{{{ $labels.model_name }}}}: {{{{ $value }}}} slots a round, but the draft was trained for {block}",
        ),
        Alert(
            "DSparkSlotsDoNotAddUp", "info", "15m",
            "abs(sum by (service, model_name) (dspark:slot_acceptance:5m) - (dspark:acceptance_length:5m - 1)) > 0.05",
            "{{ $labels.model_name }}: accepted by slot and accepted in total differ by {{ $value | printf \"%.2f\" }}",
        ),
    ]  # fmt: skip


def _engine() -> list[Alert]:
    tokens = [f"{engine}:generation_tokens_total" for engine in ("vllm", "k3dspark", "tokenspeed", "sglang")]
    restarts = "\nor ".join(f"sum by (service, instance) (resets({name}[15m])) > 0" for name in tokens)
    known = " or ".join(tokens)
    return [
        Alert(
            "DSparkScrapeFailing", "critical", "3m", 'up{job=~"dspark-.*"} == 0',
            "{{ $labels.instance }} does not answer scrapes",
        ),
        Alert(
            "DSparkFamilyMissing", "warning", "10m",
            f'up{{job="{ENGINES_JOB}"}} == 1\nunless on (service, instance) ({known})',
            "{{ $labels.instance }} answers, but counts no generated tokens under any name that is known",
        ),
        Alert(
            "DSparkEngineRestarted", "info", "0m", restarts,
            "{{ $labels.instance }} restarted in the last quarter of an hour",
        ),
        Alert(
            "DSparkIdleWhileQueued", "warning", "10m",
            "dspark:device_utilisation < 0.3\nand on (service) sum by (service) (dspark:requests_waiting) > 0",
            "devices of {{ $labels.service }} are {{ $value | humanizePercentage }} busy while requests wait",
        ),
    ]  # fmt: skip


def _devices() -> list[Alert]:
    return [
        Alert(
            "DSparkDeviceFault", "critical", "1m", "npu_chip_info_health_status == 0\nor DCGM_FI_DEV_XID_ERRORS > 0",
            "a device on {{ $labels.instance }} reports a fault",
        ),
    ]  # fmt: skip
