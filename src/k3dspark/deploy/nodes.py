"""The other nodes of a cluster, asked over ssh with one short shell script: name, clock, ports, driver, chips."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from k3dspark.deploy.command import run
from k3dspark.deploy.host import names_this_machine, read_host_name, resolve
from k3dspark.deploy.npu_smi import NpuInfo, parse_info
from k3dspark.deploy.versions import parse_version_file, release_of
from k3dspark.errors import BadInput

_TABLE: Final = "== npu-smi"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,252}(?:@[A-Za-z0-9][A-Za-z0-9._:\-]{0,252})?")


@dataclass(frozen=True)
class Node:
    """One node. `problem` says why it did not answer; the rest is then empty.

    `offset_seconds` is its clock minus ours, known to ± `uncertainty_seconds`. `sees` maps the names of all nodes to
    the address that this node resolves them to ("" where it cannot).
    """

    name: str
    addresses: tuple[str, ...]
    host_name: str = ""
    offset_seconds: float = 0.0
    uncertainty_seconds: float = 0.0
    taken_ports: tuple[int, ...] = ()
    driver: str = ""
    npus: NpuInfo | None = None
    sees: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    @property
    def skew_seconds(self) -> float:
        """How far its clock is off at least."""
        return max(0.0, abs(self.offset_seconds) - self.uncertainty_seconds)


def parse_nodes(text: str) -> tuple[str, ...]:
    """Names separated by commas. Raises `BadInput` on what is no host name: it would become part of a command."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadInput(
                f"{name[:80]!r} is no host name",
                "--nodes takes names or addresses separated by commas",
                "check --nodes",
            )
    if not names:
        raise BadInput("--nodes names no node", "it takes names or addresses separated by commas", "check --nodes")
    return tuple(names)


def read_nodes(names: Sequence[str], ports: Sequence[int], timeout_seconds: float) -> tuple[Node, ...]:
    """Ask every node; one that is this node is asked without ssh."""
    return tuple(_ask(name, names, ports, timeout_seconds) for name in names)


def _ask(name: str, names: Sequence[str], ports: Sequence[int], timeout_seconds: float) -> Node:
    host = name.rpartition("@")[2]
    addresses = resolve(host)
    here = names_this_machine(host) or host == read_host_name().name
    shell = ["sh", "-s"]
    over = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout_seconds / 2))}", name, *shell]
    before = time.time()
    answer = run(shell if here else over, timeout_seconds, _script(names))
    after = time.time()
    if answer.outcome != "ok" or "time=" not in answer.stdout:
        reason = {"missing": "ssh is not installed here", "hung": f"no answer in {timeout_seconds:g} s"}
        problem = reason.get(answer.outcome) or answer.said or f"status {answer.status}"
        return Node(name, addresses, problem=problem)
    return _parse_answer(name, addresses, answer.stdout, before, after, ports)


def _script(names: Sequence[str]) -> str:
    """Plain sh; every line of output is `key=value` until the table of npu-smi."""
    hosts = " ".join(name.rpartition("@")[2] for name in names)
    return f"""
printf 'time=%s\\n' "$(date +%s.%N)"
printf 'host=%s\\n' "$(hostname)"
for n in {hosts}; do printf 'sees.%s=%s\\n' "$n" "$(getent ahosts "$n" | head -n 1 | cut -d' ' -f1)"; done
(ss -Hltn 2>/dev/null || netstat -ltn 2>/dev/null) | sed 's/^/listen=/'
sed 's/^/driver./' /usr/local/Ascend/driver/version.info 2>/dev/null
echo '{_TABLE}'
command -v npu-smi >/dev/null && timeout 10 npu-smi info 2>&1
exit 0
"""


def _parse_answer(
    name: str, addresses: tuple[str, ...], text: str, before: float, after: float, ports: Sequence[int]
) -> Node:
    plain, _, table = text.partition(_TABLE)
    fields = parse_version_file(plain)
    try:
        clock = float(fields.get("time", "").removesuffix("N").rstrip("."))  # a date without %N prints the letter
    except ValueError:
        return Node(name, addresses, problem=f"its date prints {fields.get('time', '')[:40]!r}")
    lines = [line for line in plain.splitlines() if line.startswith("listen=")]
    listening = {int(port) for line in lines for port in re.findall(r"[:\]](\d{1,5})\s", line + " ")[:1]}
    driver = {key.removeprefix("driver."): value for key, value in fields.items() if key.startswith("driver.")}
    sees = [line.removeprefix("sees.").partition("=") for line in plain.splitlines() if line.startswith("sees.")]
    return Node(
        name=name,
        addresses=addresses,
        host_name=fields.get("host", ""),
        offset_seconds=clock - (before + after) / 2,
        uncertainty_seconds=(after - before) / 2,
        taken_ports=tuple(port for port in ports if port in listening),
        driver=release_of(driver),
        npus=parse_info(table) if table.strip() else None,
        sees=tuple((host, address.strip()) for host, _, address in sees),
    )
