"""`k3dspark launch`: run what `plan` wrote, here or on all nodes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import clean, print_json

if TYPE_CHECKING:
    from k3dspark.deploy.launch import LaunchEvent


def launch(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `plan --out DIR` wrote.")],
    node: Annotated[int | None, typer.Option(help="Run this node alone, on this machine.")] = None,
    no_copy: Annotated[bool, typer.Option("--no-copy", help="The nodes share DIR: copy nothing.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds until it must be healthy.", min=1)] = 7200.0,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.", min=1)] = 30.0,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Where logs go; else DIR/logs.")] = None,
    until_healthy: Annotated[
        bool, typer.Option("--until-healthy", help="A rehearsal: start, speculate once, stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No lines of the logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")] = False,
) -> None:
    """Start every node, wait until it is healthy, follow the logs and say what a known failure in them means.

    Runs until Ctrl-C or SIGTERM; then the engine gets SIGTERM and what is left of it SIGKILL. Nothing outlives this
    command. Exit status: 0 it was healthy and was stopped, 2 DIR is no plan, 3 it failed, 130 stopped before healthy.
    """
    from k3dspark.deploy.launch import Launch, LaunchWay
    from k3dspark.deploy.launch_files import read_launch_directory

    plan = read_launch_directory(directory)
    tell = _json_line if as_json else _Printer(quiet)
    for name in plan.changed():
        print(f"note: {name} differs from what plan wrote, and is run as it is", file=sys.stderr)
    way = LaunchWay(node, not no_copy, deadline, grace, logs, until_healthy)
    with _stopping_on_signals() as stop, Launch(plan, way, tell) as running:
        running.run(stop)
    if not running.healthy:
        raise typer.Exit(130)


@contextmanager
def _stopping_on_signals() -> Iterator[Event]:
    """An event that the first SIGINT or SIGTERM sets; a second SIGINT interrupts what is being waited for."""
    stop = Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _json_line(event: LaunchEvent) -> None:
    fields: dict[str, Any] = {"event": event.kind, "node": event.node, "text": event.text}
    if event.failure is not None:
        fields["failure"] = {"id": event.failure.id, "means": event.failure.means, "remedy": event.failure.remedy}
    if event.seconds:
        fields["seconds"] = round(event.seconds, 3)
    print_json(fields, indent=None)
    sys.stdout.flush()


class _Printer:
    """Steps and failures on standard error, lines of the logs on standard output."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)

    def __call__(self, event: LaunchEvent) -> None:
        from rich.text import Text

        if event.kind == "line":
            if not self._quiet:
                print(f"{event.node} | {clean(event.text)}", flush=True)
            return
        if event.failure is not None:
            style = "bold red" if event.failure.fatal else "yellow"
            self._console.print(Text.assemble((f"node {event.node}: ", style), event.failure.means), soft_wrap=True)
            self._console.print(Text.assemble(("     do: ", "green"), event.failure.remedy), soft_wrap=True)
            return
        where = "" if event.node is None else f"node {event.node} "
        after = f" after {event.seconds:.0f} s" if event.seconds else ""
        style = "bold green" if event.kind in ("healthy", "speculative") else "dim"
        words = f"{where}{event.kind}{after}{': ' * bool(event.text)}{clean(event.text)}"
        self._console.print(Text(words, style), soft_wrap=True)
