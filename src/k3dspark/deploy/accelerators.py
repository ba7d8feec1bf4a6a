"""The accelerators of this node: asked of `npu-smi` and `nvidia-smi`, as installed."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Final, Literal

from k3dspark.deploy.command import Ran, run
from k3dspark.deploy.npu_smi import (
    HccsBandwidth,
    HccsLinks,
    NpuInfo,
    parse_fields,
    parse_hccs,
    parse_hccs_bandwidth,
    parse_info,
)

DeviceKind = Literal["npu", "cuda", "cpu"]

BF16_CAPABILITY: Final = (8, 0)  # Ampere and newer
_CUDA_QUERY: Final = "index,name,driver_version,memory.total,memory.used,compute_cap"


@dataclass(frozen=True)
class NpuFacts:
    """What `npu-smi` said, and how the asking went. `board` holds the fields of the first chip's board."""

    tool: Ran
    info: NpuInfo
    board: dict[str, str]


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's query."""

    index: int
    name: str
    driver: str
    memory_total_mb: int | None
    memory_used_mb: int | None
    capability: tuple[int, int] | None

    @property
    def free_mb(self) -> int | None:
        if self.memory_total_mb is None or self.memory_used_mb is None:
            return None
        return self.memory_total_mb - self.memory_used_mb

    @property
    def bf16(self) -> bool | None:
        return None if self.capability is None else self.capability >= BF16_CAPABILITY


@dataclass(frozen=True)
class CudaFacts:
    """What `nvidia-smi` said."""

    tool: Ran
    gpus: tuple[Gpu, ...]


def read_npus(timeout_seconds: float) -> NpuFacts:
    """Ask for the table, and for the first NPU's board (firmware, product), with or without `-c`: 950 refuses it."""
    tool = run(["npu-smi", "info"], timeout_seconds)
    info = parse_info(tool.stdout + tool.stderr)
    board: dict[str, str] = {}
    if info.chips and tool.outcome == "ok":
        asked = run(["npu-smi", "info", "-t", "board", "-i", str(info.chips[0].npu)], timeout_seconds)
        board = parse_fields(asked.stdout) if asked.outcome == "ok" else {}
    return NpuFacts(tool, info, board)


def read_hccs(npu: int, chip: int, timeout_seconds: float) -> tuple[HccsBandwidth | None, HccsLinks | None]:
    """Traffic and error counters of one chip's HCCS links, as far as this product has them."""
    where = ["-i", str(npu), "-c", str(chip)]
    rates = run(["npu-smi", "info", "-t", "hccs-bw", *where, "-time", "1000"], timeout_seconds)
    counters = run(["npu-smi", "info", "-t", "hccs", *where], timeout_seconds)
    return (
        parse_hccs_bandwidth(rates.stdout) if rates.outcome == "ok" else None,
        parse_hccs(counters.stdout) if counters.outcome == "ok" else None,
    )


def read_gpus(timeout_seconds: float) -> CudaFacts:
    """Ask nvidia-smi for what the checks need, as comma-separated values."""
    tool = run(["nvidia-smi", f"--query-gpu={_CUDA_QUERY}", "--format=csv,noheader,nounits"], timeout_seconds)
    return CudaFacts(tool, parse_gpus(tool.stdout) if tool.outcome == "ok" else ())


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of nvidia-smi's query; lines of another shape are skipped, `[N/A]` is None."""
    gpus = []
    for line in text.splitlines():
        row = [cell.strip() for cell in next(csv.reader([line]), [])]
        if len(row) != len(_CUDA_QUERY.split(",")) or not row[0].isdecimal():
            continue
        major, _, minor = row[5].partition(".")
        gpus.append(
            Gpu(
                int(row[0]),
                row[1],
                row[2],
                int(row[3]) if row[3].isdecimal() else None,
                int(row[4]) if row[4].isdecimal() else None,
                (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
            )
        )
    return tuple(gpus)


def read_hccs_of(info: NpuInfo, timeout_seconds: float) -> dict[str, tuple[HccsBandwidth | None, HccsLinks | None]]:
    """HCCS of every chip, by a name for people; the first chip that gives nothing ends the asking."""
    found: dict[str, tuple[HccsBandwidth | None, HccsLinks | None]] = {}
    for chip in info.chips:
        answer = read_hccs(chip.npu, chip.chip, timeout_seconds)
        found[f"NPU {chip.npu} chip {chip.chip}"] = answer
        if answer == (None, None):
            break
    return found
