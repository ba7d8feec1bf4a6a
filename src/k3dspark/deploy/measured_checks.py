"""What was measured, as lines of the checklist: operators against fp32, and links against what the draft needs.

Measuring needs torch and is done elsewhere; only numbers arrive here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from k3dspark.deploy.items import Item, Status
from k3dspark.deploy.links import FAIL_SHARE, WARN_SHARE, Load, bound, needed_bytes_per_second
from k3dspark.deploy.npu_smi import HccsBandwidth, HccsLinks


class MeasuredOperator(Protocol):
    """One operator's result, whoever measured it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def error(self) -> float | None: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def milliseconds(self) -> float | None: ...
    @property
    def implementation(self) -> str: ...
    @property
    def problem(self) -> str: ...


class MeasuredLink(Protocol):
    """One pair of processes: what a large message achieved, and how long a small one takes one way."""

    @property
    def source(self) -> str: ...
    @property
    def destination(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def latency_ms(self) -> float: ...


def operator_items(results: Sequence[MeasuredOperator]) -> Iterator[Item]:
    """One line an operator; a local implementation that is right is a warning: it works, and costs time."""
    for result in results:
        values = {
            "shape": result.shape,
            "error": "–" if result.error is None else f"{result.error:.1e}",
            "tolerance": f"{result.tolerance:.0e}",
            "ms": "–" if result.milliseconds is None else f"{result.milliseconds:.3f}",
            "how": result.implementation,
            "problem": result.problem,
        }
        wrong = result.error is None or not result.error <= result.tolerance  # NaN is wrong, too
        status: Status = "fail" if wrong else "warn" if result.problem else "pass"
        message = "ops.failed" if result.error is None else "ops.wrong" if wrong else "ops.local"
        yield Item("ops.operator", status, message if status != "pass" else "ops.right", values, result.name)


def link_items(
    load: Load,
    requests: int,
    links: Sequence[MeasuredLink],
    hccs: Mapping[str, tuple[HccsBandwidth | None, HccsLinks | None]],
) -> Iterator[Item]:
    """The load, then one line a measured pair and one a chip whose HCCS counters were read."""
    values: dict[str, object] = {
        "hidden": f"{load.hidden_bytes:,}",
        "requests": requests,
        "rows": load.rows,
        "round": f"{load.round_bytes / 1e6:.2f}",
        "rounds": f"{load.rounds_per_second:.0f}",
        "rate": f"{load.bytes_per_second / 1e9:.3f}",
        "step": f"{load.step_ms:g}",
        "needed": f"{needed_bytes_per_second(load) / 1e9:.2f}",
        "share": f"{WARN_SHARE:.0%}",
    }
    yield Item("links.load", "pass", "links.load", values)
    for link in links:
        result = bound(load, link.bytes_per_second, link.latency_ms)
        measured = {
            **values,
            "from": link.source,
            "to": link.destination,
            "backend": link.backend,
            "bandwidth": f"{link.bytes_per_second / 1e9:.2f}",
            "latency": f"{link.latency_ms * 1000:.0f}",
            "transfer": f"{result.transfer_ms:.2f}",
            "of_step": f"{result.share_of_step:.1%}",
            "bound": f"{result.speed_up:.2f}",
            "most": f"{result.speed_up_without_link:.0f}",
        }
        status: Status = "pass"
        if result.share_of_step > WARN_SHARE:
            status = "fail" if result.share_of_step > FAIL_SHARE else "warn"
        message = "links.measured" if status == "pass" else "links.slow"
        yield Item("links.measured", status, message, measured, f"{link.source} → {link.destination}")
    if not links:
        yield Item("links.measured", "na", "links.unmeasured")
    for name, (rates, counters) in hccs.items():
        yield _hccs(name, rates, counters)


def _hccs(name: str, rates: HccsBandwidth | None, counters: HccsLinks | None) -> Item:
    if rates is None and counters is None:
        return Item("links.hccs", "na", "links.hccs.none", {}, name)
    values = {
        "sent": "–" if rates is None else f"{rates.sent_gb_per_s:.2f}",
        "received": "–" if rates is None else f"{rates.received_gb_per_s:.2f}",
        "errors": "–" if counters is None else counters.errors,
        "retries": "–" if counters is None else counters.retries,
    }
    if counters is not None and (not counters.healthy or counters.errors):
        return Item("links.hccs", "fail" if not counters.healthy else "warn", "links.hccs.sick", values, name)
    return Item("links.hccs", "pass", "links.hccs", values, name)
