"""This node itself: processor, memory, disk, ports, host name. Files are read below a root, so that a mounted image or
a recorded node can be checked too."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from k3dspark.errors import BadInput

_BF16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16"}
_READ: Final = 1 << 18


@dataclass(frozen=True)
class Processor:
    """/proc/cpuinfo and /proc/meminfo. Bytes are None where the file does not say."""

    name: str
    cores: int
    bf16: bool
    memory_total_bytes: int | None
    memory_available_bytes: int | None


@dataclass(frozen=True)
class Disk:
    """A place that gets files, and the room on its file system."""

    place: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Port:
    """Whether a server could listen on a port now."""

    number: int
    state: Literal["free", "taken", "forbidden"]
    reason: str = ""


@dataclass(frozen=True)
class HostName:
    """This node's own name and what it resolves to here; no address when it does not resolve."""

    name: str
    addresses: tuple[str, ...]


def read_processor(root: Path) -> Processor:
    """The processor and memory that the kernel reports."""
    cpuinfo = _text(root / "proc/cpuinfo")
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields = [(key.strip().lower(), value.strip()) for key, _, value in lines]
    flags = {word for key, value in fields if key in ("flags", "features") for word in value.split()}
    name = next((value for key, value in fields if key in ("model name", "cpu model", "hardware")), os.uname().machine)
    memory = dict(re.findall(r"^(\w+):\s+(\d{1,15}) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    return Processor(
        name=name,
        cores=sum(key == "processor" for key, _ in fields),
        bf16=bool(flags & _BF16_FLAGS),
        memory_total_bytes=_kilobytes(memory.get("MemTotal")),
        memory_available_bytes=_kilobytes(memory.get("MemAvailable")),
    )


def read_disk(place: Path) -> Disk:
    """The file system of a path, or of its nearest parent that exists."""
    here = place.absolute()
    while not here.exists():
        here = here.parent
    usage = shutil.disk_usage(here)
    return Disk(str(place), usage.free, usage.total)


def read_ports(numbers: Sequence[int]) -> tuple[Port, ...]:
    """Try each port on all addresses, as a server would bind it."""
    return tuple(_try_port(number) for number in numbers)


def _try_port(number: int) -> Port:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a server that just ended must not count as a taken port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))
        except OSError as error:
            state: Literal["taken", "forbidden"] = "taken" if error.errno == errno.EADDRINUSE else "forbidden"
            return Port(number, state, error.strerror or str(error))
    return Port(number, "free")


def parse_ports(text: str) -> tuple[int, ...]:
    """Port numbers separated by commas. Raises `BadInput`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and len(word) < 6 and 0 < int(word) < 65536 for word in words):
        raise BadInput(f"{text[:80]!r} is no list of ports", "ports are numbers from 1 to 65535", "check --ports")
    return tuple(dict.fromkeys(int(word) for word in words))


def read_host_name() -> HostName:
    """This node's name, resolved as a peer library would resolve it."""
    name = socket.gethostname()
    return HostName(name, resolve(name))


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name, without doubles; none when it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def names_this_machine(name: str) -> bool:
    """Whether a name means "here" on every machine, as in a rehearsal of several nodes on one."""
    return name.rpartition("@")[2] in ("localhost", "127.0.0.1", "::1")


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text) * 1024


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ).decode("utf-8", "replace")
    except OSError:
        return ""
