"""One node's engine as a process here or over ssh, under a supervisor that stops it when this process is gone."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from k3dspark.errors import BadInput, EngineFault

_LINE_BYTES: Final = 1 << 16
SSH: Final = (
    "ssh",
    "-o", "BatchMode=yes",  # a password prompt would hang the launch
    "-o", "ConnectTimeout=15",
    "-o", "ServerAliveInterval=15",  # a dead connection is noticed within a minute
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip


class NodeProcess:
    """A running node. Lines of its output go to its log file and to `line(node, text)`, from a thread of its own."""

    def __init__(
        self,
        node: int,
        host: str,
        directory: Path,
        grace: float,
        log: Path,
        line: Callable[[int, str], None],
        remote: str | None = None,
    ) -> None:
        """`remote` is the launch directory's path on `host` when it is reached over ssh, else None."""
        self.node, self.host, self.grace = node, host, grace
        seconds = str(max(1, round(grace)))
        if remote is None:
            command = ["bash", str(directory / "supervise.sh"), str(node), seconds]
        else:
            command = [*SSH, host, shlex.join(["bash", f"{remote}/supervise.sh", str(node), seconds])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this program only, which then stops the nodes in order
        )
        self._reader = Thread(target=self._read, args=(log, line), daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """Begin to stop; returns at once."""
        self._tell(b"stop\n")

    def kill(self) -> None:
        """No more grace."""
        self._tell(b"kill\n")

    def wait_stopped(self, seconds: float) -> bool:
        """Whether it has ended within that time; its output is read to the end."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(5)
        return True

    def abandon(self) -> None:
        """Give up waiting: close the pipe, which stops the far side, and end the local process."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if not self.wait_stopped(2):
            self._process.kill()
            self.wait_stopped(2)

    def _tell(self, word: bytes) -> None:
        with suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(word)
                self._process.stdin.flush()

    def _read(self, log: Path, line: Callable[[int, str], None]) -> None:
        assert self._process.stdout is not None
        with log.open("wb") as file:
            while data := self._process.stdout.readline(_LINE_BYTES):
                file.write(data)
                file.flush()
                line(self.node, data.decode("utf-8", "replace").rstrip("\r\n"))


def copy_to(host: str, directory: Path, remote: str) -> None:
    """Copy the launch directory's files over ssh. Raises `EngineFault` with ssh's own words."""
    if shutil.which("ssh") is None:
        raise BadInput("ssh is not installed", "other nodes are reached with it", "install it, or run --node on each")
    files = sorted(path.name for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    place = shlex.quote(remote)
    pack = subprocess.Popen(["tar", "-C", str(directory), "-cf", "-", *files], stdout=subprocess.PIPE)
    try:
        done = subprocess.run(
            [*SSH, host, f"mkdir -p -- {place} && tar -C {place} -xf -"],
            stdin=pack.stdout,
            capture_output=True,
            check=False,
            timeout=120,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFault(f"{host} does not answer", "copying the plan took two minutes", "check ssh to it") from error
    finally:
        pack.kill()
        pack.wait()
        if pack.stdout is not None:
            pack.stdout.close()
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise EngineFault(
            f"the plan could not be copied to {host}",
            " / ".join(words[-2:])[:400] or f"ssh ended with status {done.returncode}",
            f"try: ssh {host} true; or pass --no-copy when {remote} is a shared disk",
        )


def is_here(host: str) -> bool:
    """Whether a host name leads to an address of this machine."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(_can_bind(str(address), 0) for address in addresses)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port of this machine."""
    return _can_bind("0.0.0.0", port)


def _can_bind(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server's own old connections do not count
            probe.bind((address, port))
    except OSError:
        return False
    return True
