"""Running a launch directory: start every node, wait for health, follow logs, recognise failures, stop cleanly."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Final, Literal

from k3dspark.deploy.failures import Failure, recognise
from k3dspark.deploy.launch_files import LaunchDirectory
from k3dspark.deploy.node_process import NodeProcess, copy_to, is_here, port_is_free
from k3dspark.errors import BadInput, EngineFault

_ASK_EVERY_SECONDS: Final = 2.0


@dataclass(frozen=True)
class LaunchWay:
    """How to run a plan. `node` runs that node alone, here; otherwise all of them, the others over ssh."""

    node: int | None = None
    copy: bool = True
    deadline_seconds: float = 7200.0
    grace_seconds: float = 30.0
    logs: Path | None = None
    until_healthy: bool = False
    """Stop again as soon as it is healthy and has speculated once: a rehearsal."""


@dataclass(frozen=True)
class LaunchEvent:
    """Something to tell: a line of a log, a recognised failure, or a step of the launch."""

    kind: Literal["copied", "started", "line", "failure", "healthy", "speculative", "stopping", "stopped"]
    node: int | None = None
    text: str = ""
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass
class Launch:
    """One run. Use `with Launch(...) as launch: launch.run(stop)`; leaving the block leaves nothing running."""

    directory: LaunchDirectory
    way: LaunchWay
    tell: Callable[[LaunchEvent], None]
    nodes: list[NodeProcess] = field(default_factory=list)
    healthy: bool = False
    _lines: SimpleQueue[tuple[int, str]] = field(default_factory=SimpleQueue)
    _seen: dict[tuple[int, str], tuple[Failure, str]] = field(default_factory=dict)
    _started: float = 0.0

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self, stop: Event) -> None:
        """Start, wait for health and follow until `stop` is set. Raises `EngineFault` when a node ends or the deadline
        passes; `stop` ends it quietly at any time."""
        self.start()
        answered = Event()
        asking = Thread(target=self._ask, args=(answered, stop), daemon=True)
        asking.start()
        while not stop.is_set():
            self._follow(0.2)
            self._require_alive()
            if answered.is_set() and not self.healthy:
                self.healthy = True
                self.tell(LaunchEvent("healthy", text=self.directory.url, seconds=self._seconds()))
                if self.way.until_healthy:
                    self._rehearse()
                    return
            if not self.healthy and self._seconds() > self.way.deadline_seconds:
                raise self._fault(f"not healthy within {self.way.deadline_seconds:g} s")

    def start(self) -> None:
        """Copy the plan where it is needed and start the nodes, the head first."""
        hosts, home = self.directory.hosts, self.directory.settled.wish.home
        chosen = range(len(hosts)) if self.way.node is None else [self.way.node]
        if self.way.node is not None and not 0 <= self.way.node < len(hosts):
            raise BadInput(f"there is no node {self.way.node}", f"the plan has {len(hosts)}, from 0 on", "pass another")
        near = {node: self.way.node is not None or is_here(hosts[node]) for node in chosen}
        self._require_free_ports(near)
        logs = self.way.logs or self.directory.path / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write logs to {logs}", str(error), "pass --logs DIR") from error
        if self.way.copy:
            for node in chosen:
                if not near[node]:
                    copy_to(hosts[node], self.directory.path, home)
                    self.tell(LaunchEvent("copied", node, hosts[node]))
        self._started = time.monotonic()
        for node in chosen:
            log = logs / f"node-{node}.log"
            with suppress(OSError):
                log.replace(log.with_suffix(".log.1"))
            process = NodeProcess(
                node, hosts[node], self.directory.path, self.way.grace_seconds, log,
                lambda *line: self._lines.put(line), None if near[node] else home,
            )  # fmt: skip
            self.nodes.append(process)
            self.tell(LaunchEvent("started", node, "here" if near[node] else hosts[node]))

    def stop(self) -> None:
        """SIGTERM to every node, SIGKILL after the grace; interrupted again, SIGKILL at once. Reads the logs' ends."""
        running = [node for node in self.nodes if node.status is None]
        if running:
            self.tell(LaunchEvent("stopping", text=f"{len(running)} node{'s' * (len(running) != 1)}"))
        for node in running:
            node.ask_to_stop()
        deadline = time.monotonic() + self.way.grace_seconds + 15.0
        lost = []
        for node in running:
            try:
                while not node.wait_stopped(0.2) and time.monotonic() < deadline:
                    self._follow(0.0)
            except KeyboardInterrupt:
                for other in running:
                    other.kill()
                deadline = min(deadline, time.monotonic() + 5.0)
                node.wait_stopped(5.0)
            if node.status is None:
                node.abandon()
                lost.append(node)
        self._follow(0.0)
        if self.nodes:
            self.tell(LaunchEvent("stopped", seconds=self._seconds()))
        self.nodes = []
        if lost:
            names = ", ".join(f"{node.node} ({node.host})" for node in lost)
            raise EngineFault(
                f"node {names} did not confirm that it stopped",
                "its connection is gone or hangs",
                "look there for processes of the engine: npu-smi info, or ps",
            )

    def _follow(self, seconds: float) -> None:
        """Hand on what the logs hold, waiting up to that long for the first line."""
        with suppress(Empty):
            while True:
                node, text = self._lines.get(timeout=seconds) if seconds else self._lines.get_nowait()
                seconds = 0.0
                self.tell(LaunchEvent("line", node, text))
                failure = recognise(text)
                if failure is not None and (node, failure.id) not in self._seen:
                    self._seen[node, failure.id] = failure, text
                    self.tell(LaunchEvent("failure", node, text, failure))

    def _require_alive(self) -> None:
        for node in self.nodes:
            if node.status is not None:
                node.wait_stopped(5.0)
                self._follow(0.0)
                raise self._fault(f"node {node.node} ({node.host}) ended with status {node.status}", node.node)

    def _fault(self, what: str, node: int | None = None) -> EngineFault:
        known = [(n, *found) for (n, _), found in self._seen.items() if found[0].fatal]
        # The first error of any node is the cause more often than the last one of the node that gave up.
        known.sort(key=lambda item: item[1].id in ("rendezvous", "hccl_timeout", "nccl_timeout", "ready_timeout"))
        logs = self.way.logs or self.directory.path / "logs"
        after = f"{what} after {self._seconds():.0f} s" if node is not None else what
        if not known:
            return EngineFault(after, "its log holds no failure known here", f"read the logs in {logs}")
        at, failure, line = known[0]
        return EngineFault(after, f"{failure.means} (node {at}: {line.strip()[:300]})", failure.remedy)

    def _require_free_ports(self, near: dict[int, bool]) -> None:
        wish = self.directory.settled.wish
        ports = [wish.port] if len(self.directory.hosts) == 1 else [wish.port, wish.rpc_port]
        for port in ports if near.get(0) else []:
            if not port_is_free(port):
                raise EngineFault(
                    f"port {port} is taken on this machine",
                    "another server listens there, and would answer the health check in place of this one",
                    "stop it, or plan again with another --port or --rpc-port",
                )

    def _ask(self, answered: Event, stop: Event) -> None:
        while not stop.is_set() and not answered.is_set() and self.nodes:
            if is_healthy(self.directory.url, self.directory.settled.wish.served_name):
                answered.set()
                return
            stop.wait(_ASK_EVERY_SECONDS)

    def _rehearse(self) -> None:
        drafted, accepted = speculate(self.directory)
        self._follow(0.0)
        if not drafted:
            raise self._fault("the engine answers, but drafted nothing")
        self.tell(LaunchEvent("speculative", text=f"{drafted:g} drafted, {accepted:g} accepted"))

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def is_healthy(url: str, name: str) -> bool:
    """Whether a server answers there and serves that model."""
    try:
        get(f"{url}/health", 5.0)
        models = json.loads(get(f"{url}/v1/models", 5.0))
        return any(model.get("id") == name for model in models["data"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def speculate(directory: LaunchDirectory) -> tuple[float, float]:
    """Tokens that one request made the engine draft and accept, from its own counters. Raises `EngineFault`."""
    url, wish = directory.url, directory.settled.wish
    body = {"model": wish.served_name, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 32, "temperature": 0}
    try:
        before = counters(get(f"{url}/metrics", 10.0).decode())
        get(f"{url}/v1/completions", 300.0, json.dumps(body).encode())
        after = counters(get(f"{url}/metrics", 10.0).decode())
    except (OSError, ValueError) as error:
        raise EngineFault("the server is healthy but answers no request", str(error), "read its log") from error
    return after[0] - before[0], after[1] - before[1]


def counters(text: str) -> tuple[float, float]:
    """(drafted, accepted) tokens in a page of metrics, summed over replicas; SGLang has only a mean length."""
    drafted = accepted = 0.0
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:spec_decode_num_draft_tokens_total"):
            drafted += float(value)
        elif name.startswith("vllm:spec_decode_num_accepted_tokens_total"):
            accepted += float(value)
        elif name.startswith("sglang:spec_accept_length"):
            drafted, accepted = drafted + float(value), accepted + max(float(value) - 1.0, 0.0)
    return drafted, accepted


def get(url: str, timeout: float, body: bytes | None = None) -> bytes:
    """The answer's body, past any proxy. Raises `OSError`, also for a status that is no success."""
    opener: Any = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
    with opener.open(request, timeout=timeout) as answer:
        data: bytes = answer.read(16 << 20)
        return data
