"""The seed's checks of the accelerator: model, health, driver, firmware, CANN, bfloat16, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from k3dspark.checkpoint.fields import value_of
from k3dspark.checkpoint.figures import figures
from k3dspark.deploy.command import Ran
from k3dspark.deploy.engines import parse_version
from k3dspark.deploy.facts import Facts
from k3dspark.deploy.items import Item, Status
from k3dspark.deploy.versions import cann_of, firmware_fits, numbers
from k3dspark.errors import BadInput

# Runtime, communication buffers and workspace beside weights and cache. With Kimi K3's 9.47 GB of draft weights this
# gives the founding checklist's figures: 16 GB at least, 32 GB for long contexts.
OVERHEAD_BYTES: Final = 2 << 30
SHORT_CONTEXT: Final = 32_768
MIB: Final = 1 << 20


def device_items(facts: Facts) -> Iterator[Item]:
    """All lines of the section, for the device that was asked for."""
    if facts.device == "npu":
        yield from _npu(facts)
    elif facts.device == "cuda":
        yield from _cuda(facts)
    else:
        yield from _cpu(facts)
    yield _memory(facts)


# -- NPU ------------------------------------------------------------------------------------------------------------


def _npu(facts: Facts) -> Iterator[Item]:
    assert facts.npus is not None
    info, tool = facts.npus.info, facts.npus.tool
    if not info.chips:
        yield _no_devices(tool, info.complaint, "npu-smi")
        yield Item("device.health", "na", "device.none")
        yield _driver(facts)
        yield _firmware(facts)
        yield _cann(facts)
        yield Item("device.bf16", "na", "device.none")
        return
    names = ", ".join(sorted({chip.name for chip in info.chips}))
    families = ", ".join(sorted({chip.family or "?" for chip in info.chips}))
    product = facts.npus.board.get("product name", "")
    values = {"count": len(info.chips), "names": names, "family": families, "product": product or "–"}
    if info.cut or tool.outcome != "ok":
        yield Item("device.present", "warn", "device.present.cut", {**values, "how": tool.outcome})
    else:
        yield Item("device.present", "pass", "device.present", values)
    yield from _health(facts)
    yield _driver(facts)
    yield _firmware(facts)
    yield _cann(facts)
    yield from _npu_bf16(facts)


def _no_devices(tool: Ran, complaint: str, program: str) -> Item:
    """Why there is no device: not installed, hung, failed with words, or an empty table."""
    values = {"tool": program, "seconds": f"{tool.timeout_seconds:g}", "said": complaint or tool.said or "–"}
    if tool.outcome == "failed":
        return Item("device.present", "fail", "device.tool.failed", {**values, "status": tool.status})
    kind = "device.tool.empty" if tool.outcome == "ok" else f"device.tool.{tool.outcome}"
    return Item("device.present", "fail", kind, values)


def _health(facts: Facts) -> Iterator[Item]:
    assert facts.npus is not None
    sick = [chip for chip in facts.npus.info.chips if not chip.healthy]
    if not sick:
        yield Item("device.health", "pass", "device.health", {"count": len(facts.npus.info.chips)})
    for chip in sick[:16]:
        unknown = chip.health.lower() in ("unknown", "na", "n/a", "-", "")
        status: Status = "warn" if unknown else "fail"
        values = {"npu": chip.npu, "chip": chip.chip, "health": chip.health}
        yield Item("device.health", status, "device.sick", values)


def _driver(facts: Facts) -> Item:
    assert facts.npus is not None
    stated, tool = facts.ascend.driver, facts.npus.info.version
    if stated is None and not tool:
        return Item("device.driver", "warn", "device.driver.unknown")
    if stated is None:
        return Item("device.driver", "pass", "device.driver", {"version": tool, "path": "npu-smi"})
    if tool and numbers(tool)[:2] != numbers(stated.version)[:2]:
        values = {"version": stated.version, "path": stated.path, "tool": tool}
        return Item("device.driver", "warn", "device.driver.differs", values)
    return Item("device.driver", "pass", "device.driver", {"version": stated.version, "path": stated.path})


def _firmware(facts: Facts) -> Item:
    assert facts.npus is not None
    stated, driver = facts.ascend.firmware, facts.ascend.driver
    board = facts.npus.board.get("firmware version", "")
    if facts.npus.board.get("compatibility", "OK").lower() not in ("ok", "na"):
        values = {"version": board or "–", "said": facts.npus.board["compatibility"]}
        return Item("device.firmware", "fail", "device.firmware.incompatible", values)
    if stated is None:
        if not board:
            return Item("device.firmware", "warn", "device.firmware.unknown")
        return Item("device.firmware", "pass", "device.firmware", {"version": board, "path": "npu-smi info -t board"})
    values = {"version": stated.fields.get("version", stated.version), "path": stated.path}
    if driver is not None and firmware_fits(driver.fields, stated.fields) is False:
        accepted = driver.fields.get("compatible_version_fw", "")
        return Item(
            "device.firmware",
            "fail",
            "device.firmware.outside",
            {**values, "driver": driver.version, "accepted": accepted},
        )
    return Item("device.firmware", "pass", "device.firmware", values)


def _cann(facts: Facts) -> Item:
    stated = facts.ascend.cann
    engine = facts.python.distributions.get("vllm-ascend")
    wanted = _wanted_cann(engine) if engine else None
    if stated is None:
        return Item("device.cann", "warn", "device.cann.unknown", {"wanted": wanted or "–"})
    values = {"version": stated.version, "path": stated.path, "wanted": wanted or "–", "engine": engine or "–"}
    if wanted is None:
        return Item("device.cann", "pass", "device.cann.alone", values)
    have, need = numbers(stated.version), numbers(wanted)
    if have[:2] < need[:2]:
        return Item("device.cann", "fail", "device.cann.old", values)
    if have[:2] > need[:2]:
        return Item("device.cann", "warn", "device.cann.new", values)
    return Item("device.cann", "pass", "device.cann", values)


def _wanted_cann(engine: str) -> str | None:
    try:
        return cann_of(parse_version(engine))
    except BadInput:
        return None


def _npu_bf16(facts: Facts) -> Iterator[Item]:
    assert facts.npus is not None
    for name, family, bf16 in sorted({(c.name, c.family, c.bf16) for c in facts.npus.info.chips}, key=str):
        values = {"name": name, "family": family or "?"}
        if bf16 is None:
            yield Item("device.bf16", "warn", "device.bf16.unknown", values)
        elif bf16:
            yield Item("device.bf16", "pass", "device.bf16", values)
        else:
            yield Item("device.bf16", "fail", "device.bf16.none", values)


# -- CUDA and CPU ---------------------------------------------------------------------------------------------------


def _cuda(facts: Facts) -> Iterator[Item]:
    assert facts.cuda is not None
    gpus = facts.cuda.gpus
    if not gpus:
        yield _no_devices(facts.cuda.tool, "", "nvidia-smi")
    else:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        values = {"count": len(gpus), "names": names, "family": "CUDA", "product": "–"}
        yield Item("device.present", "pass", "device.present", values)
        yield Item("device.driver", "pass", "device.driver", {"version": gpus[0].driver, "path": "nvidia-smi"})
    yield from (Item(f"device.{line}", "na", "device.npu_only") for line in ("health", "firmware", "cann"))
    for name, bf16, capability in sorted({(g.name, g.bf16, g.capability) for g in gpus}, key=str):
        values = {"name": name, "family": ".".join(map(str, capability or ())) or "?"}
        kinds: dict[bool | None, tuple[Status, str]] = {
            True: ("pass", "device.bf16"),
            False: ("fail", "device.bf16.none"),
            None: ("warn", "device.bf16.unknown"),
        }
        yield Item("device.bf16", *kinds[bf16], values)


def _cpu(facts: Facts) -> Iterator[Item]:
    cpu = facts.processor
    yield Item("device.present", "pass", "device.cpu", {"name": cpu.name, "cores": cpu.cores})
    yield from (Item(f"device.{line}", "na", "device.npu_only") for line in ("health", "driver", "firmware", "cann"))
    dtype = _dtype(facts)
    values = {"name": cpu.name, "family": "CPU", "dtype": dtype}
    if cpu.bf16:
        yield Item("device.bf16", "pass", "device.bf16", values)
    elif dtype == "bfloat16":
        yield Item("device.bf16", "warn", "device.bf16.slow", values)
    else:
        yield Item("device.bf16", "pass", "device.bf16.unneeded", values)


def _dtype(facts: Facts) -> str:
    config = facts.draft.config
    try:
        return str(value_of(config, "torch_dtype")) if config is not None else "bfloat16"
    except (KeyError, TypeError):
        return "bfloat16"


# -- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Room:
    """The device that has least room: free and total bytes."""

    name: str
    free: int
    total: int
    devices: int


def _memory(facts: Facts) -> Item:
    room = _least_room(facts)
    if room is None:
        return Item("device.memory", "na", "device.memory.unknown")
    need = _needed(facts, room.devices)
    if need is None:
        return Item("device.memory", "na", "device.memory.config")
    short, full, values = need
    values = {**values, "name": room.name, "free": _gb(room.free), "total": _gb(room.total)}
    if room.total < short:
        return Item("device.memory", "fail", "device.memory.small", values)
    if room.free < short:
        return Item("device.memory", "fail", "device.memory.taken", {**values, "holders": _holders(facts)})
    if room.free < full:
        return Item("device.memory", "warn", "device.memory.short", values)
    return Item("device.memory", "pass", "device.memory", values)


def _needed(facts: Facts, devices: int) -> tuple[int, int, dict[str, object]] | None:
    """(bytes at a short context, bytes at the full one, the arithmetic), on each device; None for a broken config."""
    config = facts.draft.config
    if config is None or any(verdict.status == "fail" for verdict in facts.draft.verdicts):
        return None
    known = {figure.name: figure.value for figure in figures(config)}
    weights, per_token = int(known["weights_bytes"]), int(known["kv_bytes_per_token"])
    context = int(config["max_position_embeddings"])
    brief = min(context, SHORT_CONTEXT)
    share = facts.target.bytes // (devices * max(1, len(facts.nodes))) if facts.target is not None else 0
    base = weights + share + OVERHEAD_BYTES
    short, full = base + per_token * brief, base + per_token * context
    values: dict[str, object] = {
        "short": _gb(short),
        "full": _gb(full),
        "weights": _gb(weights),
        "share": _gb(share),
        "overhead": _gb(OVERHEAD_BYTES),
        "per_token": per_token,
        "brief": brief,
        "context": context,
    }
    return short, full, values


def _least_room(facts: Facts) -> _Room | None:
    if facts.device == "cpu":
        free, total = facts.processor.memory_available_bytes, facts.processor.memory_total_bytes
        return None if free is None or total is None else _Room("RAM", free, total, 1)
    rooms = []
    if facts.npus is not None:
        chips = facts.npus.info.chips
        for chip in chips:
            if chip.free_mb is not None and chip.memory_total_mb is not None:
                name = f"NPU {chip.npu} chip {chip.chip}"
                rooms.append(_Room(name, chip.free_mb * MIB, chip.memory_total_mb * MIB, len(chips)))
    if facts.cuda is not None:
        for gpu in facts.cuda.gpus:
            if gpu.free_mb is not None and gpu.memory_total_mb is not None:
                count = len(facts.cuda.gpus)
                rooms.append(_Room(f"GPU {gpu.index}", gpu.free_mb * MIB, gpu.memory_total_mb * MIB, count))
    return min(rooms, key=lambda room: (room.free, room.total)) if rooms else None


def _holders(facts: Facts) -> str:
    """Who holds the memory, as far as the device's process table tells."""
    processes = facts.npus.info.processes if facts.npus is not None else ()
    largest = sorted(processes, key=lambda process: -(process.memory_mb or 0))[:3]
    return ", ".join(f"{p.name} ({p.pid}, {p.memory_mb or '?'} MB)" for p in largest) or "–"


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.2f}"
