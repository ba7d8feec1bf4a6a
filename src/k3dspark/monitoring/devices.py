"""Accelerators as npu-exporter and DCGM report them. What a device does not support is None, never −1 and never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from k3dspark.monitoring.exposition import Exposition, Sample

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Device:
    """One accelerator. `utilisation` and `bandwidth_use` are 0 to 1."""

    source: str
    id: str
    name: str = ""
    utilisation: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    bandwidth_use: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    healthy: bool | None = None
    link_up: bool | None = None


def read_devices(exposition: Exposition, source: str) -> tuple[Device, ...]:
    """Every device that a scrape shows; empty when it comes from no exporter that is known."""
    return (*_npus(exposition, source), *_gpus(exposition, source))


def known_exporter(exposition: Exposition) -> str:
    """The exporter's name, empty when none is known. An exporter may well show no device at all."""
    if exposition.has_prefix("npu_chip_info_") or exposition.has_prefix("machine_npu_nums"):
        return "npu-exporter"
    return "DCGM" if exposition.has_prefix("DCGM_FI_") else ""


def _npus(exposition: Exposition, source: str) -> list[Device]:
    def values(*names: str) -> dict[tuple[str, ...], float]:
        return _values(exposition, [f"npu_chip_info_{name}" for name in names], ("id", "vdie_id"))

    busy = values("utilization", "overall_utilization")
    used, total = values("hbm_used_memory"), values("hbm_total_memory")
    bandwidth, power, heat = values("hbm_bandwidth_utilization"), values("power"), values("temperature")
    health, link = values("health_status"), values("link_status")
    names = _names(exposition, "npu_chip_info_", ("id", "vdie_id"), "model_name")
    return [
        Device(
            source,
            key[0],
            names.get(key, ""),
            _share(busy.get(key)),
            _scaled(used.get(key), MIB),
            _scaled(total.get(key), MIB),
            _share(bandwidth.get(key)),
            power.get(key),
            heat.get(key),
            _flag(health.get(key)),
            _flag(link.get(key)),
        )
        for key in _keys(busy, used, total, power, heat, health)
    ]


def _gpus(exposition: Exposition, source: str) -> list[Device]:
    labels = ("gpu", "UUID")

    def values(name: str) -> dict[tuple[str, ...], float]:
        return _values(exposition, [f"DCGM_FI_{name}"], labels)

    busy, engine = values("DEV_GPU_UTIL"), values("PROF_GR_ENGINE_ACTIVE")
    used, free = values("DEV_FB_USED"), values("DEV_FB_FREE")
    bandwidth, power, heat = values("PROF_DRAM_ACTIVE"), values("DEV_POWER_USAGE"), values("DEV_GPU_TEMP")
    faults = values("DEV_XID_ERRORS")
    names = _names(exposition, "DCGM_FI_", labels, "modelName")
    return [
        Device(
            source,
            key[0],
            names.get(key, ""),
            # The profiling field counts time with work in flight, 0 to 1; the older one is a percentage.
            _share(engine[key] * 100 if key in engine else busy.get(key)),
            _scaled(used.get(key), MIB),
            _scaled(used[key] + free[key] if key in used and key in free else None, MIB),
            _share(bandwidth[key] * 100 if key in bandwidth else None),
            power.get(key),
            heat.get(key),
            faults[key] == 0 if key in faults else None,
        )
        for key in _keys(busy, engine, used, power, heat)
    ]


def _values(exposition: Exposition, names: list[str], labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    """Values by device. Negative means unsupported; so do DCGM's blanks, which begin at 2^31 − 16."""
    found: dict[tuple[str, ...], float] = {}
    for name in names:
        for sample in exposition.by_name.get(name, ()):
            if 0 <= sample.value < 2**31 - 16:
                found.setdefault(_key(sample, labels), sample.value)
    return found


def _key(sample: Sample, labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sample.labels.get(label, "") for label in labels)


def _names(exposition: Exposition, prefix: str, labels: tuple[str, ...], label: str) -> dict[tuple[str, ...], str]:
    return {
        _key(sample, labels): sample.labels[label]
        for name, samples in exposition.by_name.items()
        if name.startswith(prefix)
        for sample in samples
        if sample.labels.get(label)
    }


def _keys(*tables: Mapping[tuple[str, ...], float]) -> list[tuple[str, ...]]:
    keys = {key for table in tables for key in table if key[0]}
    return sorted(keys, key=lambda key: (len(key[0]), key))


def _share(percent: float | None) -> float | None:
    return None if percent is None or percent > 100 else percent / 100


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _flag(value: float | None) -> bool | None:
    return None if value is None else value == 1
