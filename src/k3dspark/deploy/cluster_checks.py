"""This node's disk, shared memory, ports and name; and what only several nodes get wrong: names, clocks, drivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from k3dspark.deploy.facts import Facts
from k3dspark.deploy.host import Disk, is_loopback, names_this_machine
from k3dspark.deploy.items import Item, Status
from k3dspark.deploy.nodes import Node

# Operator caches, compiled graphs and logs: some gigabytes; below one, engines fail at the first write.
DISK_FAIL_BYTES: Final = 1 << 30
DISK_WARN_BYTES: Final = 10 << 30
# Docker gives 64 MiB unless told otherwise; engines pass batches between processes through it.
SHARED_WARN_BYTES: Final = 1 << 30
SKEW_WARN_SECONDS: Final = 1.0
SKEW_FAIL_SECONDS: Final = 30.0


def host_items(facts: Facts) -> Iterator[Item]:
    """Lines about this node."""
    yield _disk(facts.disk)
    yield _shared(facts.shared_memory)
    for port in facts.ports:
        if port.state == "free":
            yield Item("host.ports", "pass", "host.port", {"port": port.number}, str(port.number))
        else:
            values = {"port": port.number, "reason": port.reason}
            yield Item("host.ports", "fail", f"host.port.{port.state}", values, str(port.number))
    yield _name(facts)


def _disk(disk: Disk) -> Item:
    values = {"place": disk.place, "free": f"{disk.free_bytes / 1e9:.1f}"}
    if disk.free_bytes < DISK_FAIL_BYTES:
        return Item("host.disk", "fail", "host.disk.full", values)
    return Item("host.disk", "warn" if disk.free_bytes < DISK_WARN_BYTES else "pass", "host.disk", values)


def _shared(disk: Disk | None) -> Item:
    if disk is None:
        return Item("host.shared_memory", "na", "host.shared.none")
    values = {"free": f"{disk.free_bytes / 1e6:,.0f}"}
    if disk.free_bytes < SHARED_WARN_BYTES:
        return Item("host.shared_memory", "warn", "host.shared.small", values)
    return Item("host.shared_memory", "pass", "host.shared", values)


def _name(facts: Facts) -> Item:
    name, addresses = facts.host.name, facts.host.addresses
    values = {"name": name, "addresses": ", ".join(addresses) or "–"}
    single = len([node for node in facts.nodes if not names_this_machine(node.name)]) < 2
    if not addresses:
        return Item("host.name", "warn" if single else "fail", "host.name.unresolved", values)
    if not single and all(is_loopback(address) for address in addresses):
        return Item("host.name", "fail", "host.name.loopback", values)
    return Item("host.name", "pass", "host.name", values)


# -- several nodes --------------------------------------------------------------------------------------------------


def node_items(facts: Facts) -> Iterator[Item]:
    """Lines about the cluster; not applicable to one node."""
    if not facts.nodes:
        yield from (Item(f"nodes.{line}", "na", "nodes.none") for line in ("reachable", "names", "clock", "alike"))
        return
    answering = [node for node in facts.nodes if not node.problem]
    for node in facts.nodes:
        if node.problem:
            values = {"node": node.name, "problem": node.problem}
            yield Item("nodes.reachable", "fail", "nodes.silent", values, node.name)
        else:
            values = {"node": node.name, "host": node.host_name or "–"}
            yield Item("nodes.reachable", "pass", "nodes.reachable", values, node.name)
    yield from _names(facts.nodes, answering)
    yield from _clocks(answering)
    yield from _alike(answering)
    for node in answering:
        for port in node.taken_ports:
            if not facts.ports or node.host_name != facts.host.name:
                yield Item("host.ports", "fail", "nodes.port", {"node": node.name, "port": port}, f"{node.name}:{port}")


def _names(nodes: tuple[Node, ...], answering: list[Node]) -> Iterator[Item]:
    faults = []
    owners = Counter(node.host_name for node in answering if node.host_name and not names_this_machine(node.name))
    for node in nodes:
        if not node.addresses:
            faults.append(Item("nodes.names", "fail", "nodes.unresolved", {"node": node.name}, node.name))
        elif (
            len(nodes) > 1
            and not names_this_machine(node.name)
            and all(is_loopback(address) for address in node.addresses)
        ):
            values = {"node": node.name, "addresses": ", ".join(node.addresses)}
            faults.append(Item("nodes.names", "fail", "nodes.loopback", values, node.name))
        if node.host_name and owners[node.host_name] > 1:
            values = {"host": node.host_name}
            faults.append(Item("nodes.names", "warn", "nodes.same_name", values, node.name))
        for other, address in node.sees:
            known = next((n.addresses for n in nodes if n.name.rpartition("@")[2] == other), ())
            if not address:
                values = {"node": node.name, "other": other}
                faults.append(Item("nodes.names", "fail", "nodes.blind", values, node.name))
            elif known and address not in known and not is_loopback(address):
                values = {"node": node.name, "other": other, "address": address, "known": ", ".join(known)}
                faults.append(Item("nodes.names", "warn", "nodes.other_address", values, node.name))
    yield from faults or [Item("nodes.names", "pass", "nodes.names", {"count": len(nodes)})]


def _clocks(nodes: list[Node]) -> Iterator[Item]:
    if not nodes:
        yield Item("nodes.clock", "na", "nodes.unasked")
    for node in nodes:
        values = {
            "node": node.name,
            "offset": f"{node.offset_seconds:+.2f}",
            "uncertainty": f"{node.uncertainty_seconds:.2f}",
        }
        status: Status = "pass"
        if node.skew_seconds > SKEW_WARN_SECONDS:
            status = "fail" if node.skew_seconds > SKEW_FAIL_SECONDS else "warn"
        yield Item("nodes.clock", status, "nodes.clock" if status == "pass" else "nodes.skew", values, node.name)


def _alike(nodes: list[Node]) -> Iterator[Item]:
    """Driver, chips and their number must be the same on every node."""
    for what, stated in (
        ("driver", {node.name: node.driver for node in nodes if node.driver}),
        ("chips", {node.name: _chips(node) for node in nodes if node.npus is not None}),
    ):
        listed = ", ".join(f"{name}: {value}" for name, value in stated.items())
        if len(set(stated.values())) > 1:
            yield Item("nodes.alike", "fail", f"nodes.{what}", {"listed": listed})
        elif stated:
            yield Item("nodes.alike", "pass", "nodes.alike", {"listed": listed})
    if not any(node.driver or node.npus is not None for node in nodes):
        yield Item("nodes.alike", "na", "nodes.no_npus")


def _chips(node: Node) -> str:
    chips = node.npus.chips if node.npus is not None else ()
    return f"{len(chips)} × {', '.join(sorted({chip.name for chip in chips})) or '–'}"
