"""What `npu-smi` prints, as one structure for every product: A2, A3, 950, 310P, any width, any language.

The tables are told apart by their shape (cells between bars, a PCI address, `used / total` pairs), never by column
positions or words, which change with version and language. Nothing here raises, whatever the text is.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, Literal

Family = Literal["A2", "A3", "950", "910", "310P", "310", "310B", ""]

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BARS: Final = re.compile(r"[|｜│]")
_PCI: Final = re.compile(r"^(?:[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]|NA|N/A|-)$")
_PAIR: Final = re.compile(r"(?<![\d.])(\d{1,12})\s*/\s*(\d{1,12})(?![\d.])")
_VERSION: Final = re.compile(r"npu-smi\s+v?(\d[\w.]*)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"^-?\d{1,9}(?:\.\d{1,6})?$")
_HEALTHY: Final = {"ok", "normal", "正常", "健康"}
_FAILED: Final = re.compile(r"(dcmi[^\n]*?(-?\d{4,6})?|DrvMng\w+ failed[^\n]*|driver[^\n]*not[^\n]*load[^\n]*)", re.I)


@dataclass(frozen=True)
class Chip:
    """One chip. Numbers that the tool does not give (NA, -, or cut off) are None; memory is HBM where there is HBM."""

    npu: int
    chip: int
    name: str
    health: str
    phy_id: int | None = None
    bus_id: str = ""
    power_watts: float | None = None
    temperature_celsius: float | None = None
    aicore_percent: float | None = None
    memory_used_mb: int | None = None
    memory_total_mb: int | None = None
    family: Family = ""

    @property
    def healthy(self) -> bool:
        return self.health.lower() in _HEALTHY

    @property
    def bf16(self) -> bool | None:
        """Whether the chip computes in bfloat16; None where its name does not tell."""
        return None if not self.family else self.family in ("A2", "A3", "950", "310B")

    @property
    def free_mb(self) -> int | None:
        if self.memory_total_mb is None or self.memory_used_mb is None:
            return None
        return self.memory_total_mb - self.memory_used_mb


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    npu: int
    chip: int | None
    pid: int
    name: str
    memory_mb: int | None


@dataclass(frozen=True)
class NpuInfo:
    """`npu-smi info`. `complaint` is what the tool says instead of a table; `cut`: a chip's second row is missing."""

    version: str
    chips: tuple[Chip, ...]
    processes: tuple[Process, ...] = ()
    complaint: str = ""
    cut: bool = False


def parse_info(text: str) -> NpuInfo:
    """The output of `npu-smi info`."""
    text = _ANSI.sub("", text)
    version = _VERSION.search(text)
    chips: list[Chip] = []
    processes: list[Process] = []
    pending: Chip | None = None
    cut = phy = False
    for line in text.splitlines():
        cells = _cells(line)
        if not cells:
            continue
        phy = phy or "phy" in cells[0].lower()
        process = _process(cells)
        if process is not None:
            processes.append(process)
        elif len(cells) in (2, 3):
            if pending is not None and (done := _second_row(pending, cells, phy)) is not None:
                chips.append(done)
                pending = None
            elif (started := _first_row(cells)) is not None:
                if pending is not None:
                    cut = True
                    chips.append(pending)
                pending = started
    if pending is not None:
        cut = True
        chips.append(pending)
    complaint = ""
    if not chips:
        said = [line.strip() for line in text.splitlines() if line.strip()]
        complaint = next((line for line in said if _FAILED.search(line)), said[0] if said else "")[:200]
    return NpuInfo(version[1] if version else "", _with_families(chips), tuple(processes), complaint, cut)


def _cells(line: str) -> list[str]:
    """The cells of a table line; of a line cut off before its last bar, those that are whole."""
    parts = _BARS.split(line.strip())
    if len(parts) < 3 or parts[0].strip():
        return []
    return [part.strip() for part in parts[1:-1]]


def _first_row(cells: list[str]) -> Chip | None:
    """`0  910B3 | OK | 96.1  38  0 / 0`; the last cell may have been cut off."""
    head = re.match(r"^(\d{1,6})\s+(\S.*)$", cells[0])
    if head is None or not cells[1] or _PCI.match(cells[1]) or re.search(r"[\d(%]", cells[1]):
        return None
    name = head[2].strip()
    if re.fullmatch(r"[\d\s]+", name) and not re.fullmatch(r"(?:310|910|950)\d*", name):
        return None  # two ids: that is a second row whose first one is missing
    words = cells[2].split() if len(cells) > 2 else []
    numbers = [float(word) if _NUMBER.match(word) else None for word in words[:2]]
    power, temperature = (*numbers, None, None)[:2]
    return Chip(int(head[1]), 0, name, cells[1], power_watts=power, temperature_celsius=temperature)


def _second_row(first: Chip, cells: list[str], phy: bool) -> Chip | None:
    """`0  3 | 0000:9B:00.0 | 0  0 / 0  57831/ 65536`, joined with the row above it."""
    ids = cells[0].split()
    if not ids or not all(word.isdecimal() and len(word) < 7 for word in ids) or not _PCI.match(cells[1]):
        return None
    usage = cells[2] if len(cells) > 2 else ""
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(usage)]
    used, total = max(pairs, key=lambda pair: pair[1]) if pairs else (None, None)
    if total == 0:
        used = total = None
    busy = usage.split()[:1]
    return Chip(
        npu=first.npu,
        chip=int(ids[0]),
        name=first.name,
        health=first.health,
        phy_id=int(ids[1]) if phy and len(ids) > 1 else None,
        bus_id=cells[1],
        power_watts=first.power_watts,
        temperature_celsius=first.temperature_celsius,
        aicore_percent=float(busy[0]) if busy and _NUMBER.match(busy[0]) else None,
        memory_used_mb=used,
        memory_total_mb=total,
    )


def _process(cells: list[str]) -> Process | None:
    """`1  0 | 4242 | python3 | 30012`, with or without the chip, and with or without a container column."""
    if len(cells) < 4:
        return None
    ids = cells[0].split()
    if not 1 <= len(ids) <= 2 or not all(word.isdecimal() and len(word) < 7 for word in ids):
        return None
    if not re.fullmatch(r"\d{1,10}", cells[1]):
        return None
    memory = next((int(cell) for cell in reversed(cells[2:]) if re.fullmatch(r"\d{1,9}", cell)), None)
    return Process(int(ids[0]), int(ids[1]) if len(ids) > 1 else None, int(cells[1]), cells[2], memory)


# -- products -------------------------------------------------------------------------------------------------------


def family(name: str, has_phy_id: bool = False, chips_per_npu: int = 1) -> Family:
    """The product family of a chip name; "" where the name alone does not tell.

    A3 prints plain `Ascend910`, two chips a module and a Phy-ID; `910B` without a digit is the first generation.
    """
    plain = re.sub(r"[^A-Z0-9_]", "", name.upper()).removeprefix("ASCEND")
    for pattern, result in _FAMILIES:
        if re.match(pattern, plain):
            return result
    return "A3" if plain == "910" and (has_phy_id or chips_per_npu > 1) else ""


_FAMILIES: Final[tuple[tuple[str, Family], ...]] = (
    (r"910B\d", "A2"),
    (r"(910_?93|910C)", "A3"),
    (r"(950|957)", "950"),
    (r"910(A|B|PRO|PREMIUM)", "910"),
    (r"310P", "310P"),
    (r"310B", "310B"),
    (r"310", "310"),
)


def _with_families(chips: list[Chip]) -> tuple[Chip, ...]:
    each = Counter(chip.npu for chip in chips)
    return tuple(replace(chip, family=family(chip.name, chip.phy_id is not None, each[chip.npu])) for chip in chips)


# -- other queries --------------------------------------------------------------------------------------------------


def parse_fields(text: str) -> dict[str, str]:
    """`Key : value` lines of `info -t board`, `-t memory` and the like; of a doubled key the first value."""
    fields: dict[str, str] = {}
    for line in _ANSI.sub("", text).splitlines():
        key, colon, value = line.replace("：", ":").partition(":")
        key = re.sub(r"\s+", " ", key).strip().lower()
        if colon and key and value.strip() and len(key) < 80:
            fields.setdefault(key, value.strip()[:200])
    return fields


@dataclass(frozen=True)
class Mapped:
    """One line of `npu-smi info -m`; an Mcu has no logic id and is left out."""

    npu: int
    chip: int
    logic_id: int
    name: str


def parse_mapping(text: str) -> tuple[Mapped, ...]:
    """The output of `npu-smi info -m`, also with 950's extra columns (Slot ID, Chip Phy-ID)."""
    columns: list[str] = []
    rows = []
    for line in _ANSI.sub("", text).splitlines():
        cells = re.split(r"\s{2,}|\t+", line.strip())
        lowered = [cell.lower() for cell in cells]
        if "npu id" in lowered and "chip id" in lowered:
            columns = lowered
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            npu, chip, logic = (row.get(name, "") for name in ("npu id", "chip id", "chip logic id"))
            if all(word.isdecimal() and len(word) < 7 for word in (npu, chip, logic)):
                rows.append(Mapped(int(npu), int(chip), int(logic), row.get("chip name", "")))
    return tuple(rows)


@dataclass(frozen=True)
class HccsBandwidth:
    """`npu-smi info -t hccs-bw`: what went over a chip's HCCS links while it looked, in GB/s."""

    sent_gb_per_s: float
    received_gb_per_s: float


def parse_hccs_bandwidth(text: str) -> HccsBandwidth | None:
    """The `total` row (sent, received), or the sum over links where there is none; None when there are no numbers."""
    rows = []
    for line in _ANSI.sub("", text).splitlines():
        words = [word for word in re.split(r"[\s|:｜]+", line.strip()) if word]
        if len(words) < 3 or not all(_NUMBER.match(word) for word in words[1:3]):
            continue
        pair = HccsBandwidth(float(words[1]), float(words[2]))
        if words[0].lower() == "total":
            return pair
        rows.append(pair)
    if not rows:
        return None
    return HccsBandwidth(sum(row.sent_gb_per_s for row in rows), sum(row.received_gb_per_s for row in rows))


@dataclass(frozen=True)
class HccsLinks:
    """`npu-smi info -t hccs`: counters since start, summed over a chip's links."""

    healthy: bool
    sent_bytes: int
    received_bytes: int
    errors: int
    retries: int


def parse_hccs(text: str) -> HccsLinks | None:
    """The counters, or None when the text holds none."""
    fields = {key.removeprefix("hccs "): value for key, value in parse_fields(text).items() if key.startswith("hccs ")}

    def total(name: str) -> int:
        return sum(int(word) for word in re.findall(r"\b\d{1,18}\b", fields.get(name, "")))

    if not fields:
        return None
    health = fields.get("health status", "OK")
    return HccsLinks(
        health.lower() in _HEALTHY, total("tx bytes"), total("rx bytes"), total("error count"), total("retry count")
    )
