"""Driver, firmware and CANN versions, from the files that their installers leave."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import Version

ASCEND: Final = "usr/local/Ascend"
FILE_BYTES: Final = 1 << 16
# vLLM-Ascend release → the CANN it is built and tested with.
CANN_OF_VLLM_ASCEND: Final = (("0.18", "8.5.1"), ("0.20", "9.0.0"), ("0.23", "9.1.0"), ("0.30", "9.2.1"))


@dataclass(frozen=True)
class Stated:
    """A version and the file that states it; `fields` is the rest of that file."""

    version: str
    path: str
    fields: Mapping[str, str]


@dataclass(frozen=True)
class AscendVersions:
    """What is installed below; None where no file says."""

    driver: Stated | None = None
    firmware: Stated | None = None
    cann: Stated | None = None


def parse_version_file(text: str) -> dict[str, str]:
    """`Key=value` lines (version.info, *_install.info, version.cfg), keys in lower case; anything else is skipped."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().lstrip("\ufeff").partition("=")
        if equals and re.fullmatch(r"[\w.\- ]{1,80}", key.strip()) and value.strip():
            fields.setdefault(key.strip().lower(), value.strip()[:400])
    return fields


def release_of(fields: Mapping[str, str]) -> str:
    """The release that a version file states, or "": the package's, else `Version`, else the running component's."""
    for key in ("package_version", "version_dir", "version"):
        if re.match(r"\d", fields.get(key, "")):
            return fields[key]
    for key, value in fields.items():
        # version.cfg: runtime_running_version=[7.0.0.5.242:8.0.RC2]
        found = re.fullmatch(r"\[(?:[\w.]+:)?(\d[\w.\-]*)\]", value)
        if key.endswith("_running_version") and found:
            return found[1]
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of an Ascend version, without rc and the like: 8.0.RC2 → (8, 0), 25.5.2 → (25, 5, 2)."""
    found = re.match(r"\d{1,6}(?:\.\d{1,6})*", version.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def firmware_fits(driver: Mapping[str, str], firmware: Mapping[str, str]) -> bool | None:
    """Whether the firmware lies in a range that the driver's file accepts; None where nothing can be compared."""
    ranges = re.findall(r"\[([\d.]+),([\d.]+)\]", driver.get("compatible_version_fw", ""))
    version = numbers(firmware.get("version", ""))
    if not ranges or not version:
        return None
    return any(numbers(low) <= version[: len(numbers(high))] <= numbers(high) for low, high in ranges)


def cann_of(vllm_ascend: Version) -> str | None:
    """The CANN release that a vLLM-Ascend release is built with, or None for one older than the table."""
    fitting = [cann for engine, cann in CANN_OF_VLLM_ASCEND if Version(engine).release <= vllm_ascend.release]
    return fitting[-1] if fitting else None


def read_ascend_versions(root: Path, environment: Mapping[str, str]) -> AscendVersions:
    """The versions installed below `root`, at the standard places and where the environment points."""
    prefix = _fields(root / "etc/ascend_install.info").get("driver_install_path_param", "")
    bases = [root / place.lstrip("/") for place in (prefix, ASCEND) if place]
    toolkits = [environment.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    cann = [root / place.lstrip("/") for place in toolkits if place]
    for base in bases:
        cann += [base / "cann", base / "ascend-toolkit/latest", base / "ascend-toolkit"]
    machine = os.uname().machine
    names = [
        f"{machine}-linux/ascend_toolkit_install.info",
        "aarch64-linux/ascend_toolkit_install.info",
        "x86_64-linux/ascend_toolkit_install.info",
        "ascend_toolkit_install.info",
        "compiler/version.info",
        "runtime/version.info",
        "opp/version.info",
        "version.cfg",
    ]
    return AscendVersions(
        driver=_first([base / "driver/version.info" for base in bases]),
        firmware=_first([base / "firmware/version.info" for base in bases]),
        cann=_first([place / name for place in cann for name in names]),
    )


def _first(paths: list[Path]) -> Stated | None:
    for path in paths:
        fields = _fields(path)
        if release := release_of(fields):
            return Stated(release, str(path), fields)
    return None


def _fields(path: Path) -> dict[str, str]:
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            return parse_version_file(file.read(FILE_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
