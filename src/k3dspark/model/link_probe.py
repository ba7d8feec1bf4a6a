"""`probe_links`: what a message between two processes achieves, over gloo, NCCL or HCCL, on one node or several.

Point-to-point, as hidden states travel from the devices that hold the tapped layers to the draft.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from k3dspark.errors import BadInput, EngineFault

MESSAGE_BYTES: Final = 32 << 20  # Kimi K3: 448 verified tokens, 56 requests
PING_BYTES: Final = 1024
PINGS: Final = 50
MEASURE_SECONDS: Final = 0.5
MOST_MESSAGES: Final = 64
DEFAULT_PORT: Final = 29_417
MEETING_SECONDS: Final = 300.0
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class LinkResult:
    """One direction between two processes. `latency_ms` is half a round trip of a small message."""

    source: str
    destination: str
    backend: str
    bytes_per_second: float
    latency_ms: float


def probe_links(
    device: str, nodes: Sequence[str] = (), rank: int | None = None, meeting_seconds: float = MEETING_SECONDS
) -> list[LinkResult]:
    """Measure every pair of nodes, or two devices of this one when no nodes are named; [] where there is one device.

    With nodes, each of them must run the same command within `meeting_seconds`; they meet at the first one, port
    MASTER_PORT or 29417. Raises `BadInput` when this node is not in the list, `EngineFault` when they do not meet.
    """
    if len(nodes) >= 2:
        place = own_rank(nodes, rank)
        host = nodes[0].rpartition("@")[2]
        store = _store(host, int(os.environ.get("MASTER_PORT", DEFAULT_PORT)), len(nodes), place == 0, meeting_seconds)
        return _measure_all(place, nodes, device, 0, store, meeting_seconds)
    if device != "cpu" and _devices(device) < 2:
        return []
    names = [f"{device}:{index}" if device != "cpu" else f"process {index}" for index in range(2)]
    store = _store("127.0.0.1", 0, 2, True, meeting_seconds, wait=False)
    try:
        start_processes(
            _local_process, (names, device, store.port, meeting_seconds), 2, daemon=True, start_method="spawn"
        )
    except (ProcessExitedException, ProcessRaisedException) as ended:
        raise EngineFault(
            f"the link between two {device} processes could not be measured",
            str(ended).strip().splitlines()[-1][:200],
            f"check that {_BACKENDS[device]} works on this machine",
        ) from ended
    return _collect(store, names, _BACKENDS[device])


def own_rank(nodes: Sequence[str], rank: int | None = None) -> int:
    """This node's place in the list: as stated, else by its host name or addresses. Raises `BadInput`."""
    if rank is not None:
        if rank < len(nodes):
            return rank
        raise BadInput(f"there is no node {rank}", f"--nodes names {len(nodes)}, counted from 0", "check --node-rank")
    own = socket.gethostname()
    hosts = [node.rpartition("@")[2] for node in nodes]
    places = [index for index, host in enumerate(hosts) if own in (host, host.partition(".")[0])]
    if not places:
        places = [index for index, host in enumerate(hosts) if _is_here(host)]
    if len(places) == 1:
        return places[0]
    raise BadInput(
        f"which of {', '.join(nodes)} this node is cannot be told",
        f"it calls itself {own}",
        "pass --node-rank, counted from 0",
    )


def _is_here(host: str) -> bool:
    """Whether an address of the name can be bound here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _devices(device: str) -> int:
    if device == "npu":
        import torch_npu  # noqa: F401 - registers the device
    module = getattr(torch, device)
    return int(module.device_count()) if module.is_available() else 0


def _store(
    host: str, port: int, world: int, master: bool, seconds: float, wait: bool = True
) -> Any:  # torch types it as nothing
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world, is_master=master, timeout=timedelta(seconds=seconds), wait_for_workers=wait
        )
    except (RuntimeError, OSError) as error:  # dist.DistError is a RuntimeError
        raise EngineFault(
            f"the {world} nodes did not meet at {host}:{port}",
            str(error).strip().splitlines()[0][:200] or "no reason was given",
            f"run the same command on every node within {seconds:g} s, and open that port (MASTER_PORT sets another)",
        ) from error


def _local_process(index: int, names: Sequence[str], device: str, port: int, seconds: float) -> None:
    torch.set_num_threads(1)
    store = _store("127.0.0.1", port, 2, False, seconds, wait=False)
    _measure_all(index, names, device, index, store, seconds)


def _measure_all(
    rank: int, names: Sequence[str], device: str, device_index: int, store: Any, seconds: float
) -> list[LinkResult]:
    """Every ordered pair in turn; all processes return all results."""
    backend = _BACKENDS[device]
    if device == "npu":
        import torch_npu  # noqa: F401 - registers HCCL
    place = torch.device("cpu") if device == "cpu" else torch.device(device, device_index)
    if device != "cpu":
        getattr(torch, device).set_device(place)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=len(names),
            timeout=timedelta(seconds=seconds),
        )
        for source in range(len(names)):
            for destination in range(len(names)):
                if source != destination and rank in (source, destination):
                    result = _measure(rank == source, destination if rank == source else source, place)
                    if rank == source:
                        store.set(f"result/{source}/{destination}", f"{result[0]} {result[1]}")
                # One pair at a time: another one's traffic would share the link.
                store.add(f"done/{source}/{destination}", 1)
                _wait_for(store, f"done/{source}/{destination}", len(names), seconds)
        results = _collect(store, names, backend)
        # The first node holds the store: it must outlive the others' reading.
        store.add("left", 1)
        _wait_for(store, "left", len(names), seconds)
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        raise EngineFault(
            f"the link could not be measured over {backend}",
            str(error).strip().splitlines()[0][:200] or "no reason was given",
            "check that all nodes run this command, and the interface (GLOO_, NCCL_ or HCCL_SOCKET_IFNAME)",
        ) from error
    return results


def _wait_for(store: Any, key: str, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while int(store.add(key, 0)) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the other nodes stopped answering ({key})")
        time.sleep(0.005)


def _measure(sending: bool, peer: int, device: torch.device) -> tuple[float, float]:
    """(bytes per second, one-way milliseconds), meaningful on the sending side."""
    ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    go = torch.ones(1, dtype=torch.int64, device=device)
    _echo(sending, peer, ping)  # connections are made at the first message
    start = time.perf_counter()
    for _ in range(PINGS):
        _echo(sending, peer, ping)
    latency_ms = (time.perf_counter() - start) / PINGS / 2 * 1000
    _one_way(sending, peer, message)
    _echo(sending, peer, ping)
    sent, start = 0, time.perf_counter()
    if sending:
        while sent < MOST_MESSAGES and (sent == 0 or time.perf_counter() - start < MEASURE_SECONDS):
            go.fill_(1)
            dist.send(go, peer)
            dist.send(message, peer)
            sent += 1
        go.fill_(0)
        dist.send(go, peer)
    else:
        while True:
            dist.recv(go, peer)
            if int(go) == 0:
                break
            dist.recv(message, peer)
    _echo(sending, peer, ping)  # the last message has arrived when this comes back
    elapsed = max(time.perf_counter() - start - 2 * latency_ms / 1000, 1e-9)
    return sent * MESSAGE_BYTES / elapsed, latency_ms


def _echo(first: bool, peer: int, ping: Tensor) -> None:
    _one_way(first, peer, ping)
    _one_way(not first, peer, ping)
    if ping.device.type != "cpu":
        int(ping[0])  # waits for the device


def _one_way(sending: bool, peer: int, message: Tensor) -> None:
    if sending:
        dist.send(message, peer)
    else:
        dist.recv(message, peer)


def _collect(store: Any, names: Sequence[str], backend: str) -> list[LinkResult]:
    results = []
    for source, name in enumerate(names):
        for destination, other in enumerate(names):
            if source != destination:
                rate, latency = store.get(f"result/{source}/{destination}").decode().split()
                results.append(LinkResult(name, other, backend, float(rate), float(latency)))
    return results
