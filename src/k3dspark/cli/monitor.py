"""`k3dspark monitor`: acceptance, throughput and devices of running engines; `monitor export`: rules for Prometheus."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from k3dspark.cli import options
from k3dspark.cli.output import clean, print_json
from k3dspark.errors import BadInput, EngineFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3dspark.monitoring.devices import Device
    from k3dspark.monitoring.snapshot import Snapshot

NPU_SMI_SECONDS = 20.0


class _WatchByDefault(TyperGroup):
    """`monitor URL…` is `monitor watch URL…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["watch", *args]
        return super().parse_args(ctx, args)


monitor = typer.Typer(
    cls=_WatchByDefault,
    no_args_is_help=True,
    help="Watch running engines (monitor URL…), or write what Prometheus needs to watch them (monitor export).",
)


@monitor.command()
def watch(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL…", help="Engines, npu-exporters and DCGM exporters, as HOST:PORT or URLs."),
    ] = None,
    npu_smi: Annotated[bool, typer.Option("--npu-smi", help="Also read this machine's npu-smi.")] = False,
    plain: options.PlainUrl = None,
    plain_step_ms: options.PlainStep = None,
    round_ms: Annotated[
        float | None, typer.Option("--round-ms", min=0.001, help="Time of a round, if the engine does not tell it.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between scrapes.")] = 5.0,
    window: Annotated[float, typer.Option(min=0.1, help="Seconds that the figures cover.")] = 60.0,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Stop after so many seconds.", show_default="until Ctrl-C")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Two scrapes, one interval apart, and the end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of tables: one object, or one a line while watching.")
    ] = False,
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Also serve /metrics in one naming for all engines.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Send this header; may be repeated.")
    ] = None,
) -> None:
    """Show acceptance, throughput, latency and device use, live.

    Figures are differences of counters over the window. Exit status: 0 done, 2 bad usage, 3 nothing could be scraped.
    """
    from k3dspark.monitoring.exporter import SnapshotCollector, listen_address, serve
    from k3dspark.monitoring.monitor import Costs, Monitor
    from k3dspark.monitoring.scrape import Scraper, address

    if not urls and not npu_smi:
        raise BadInput("nothing to watch", "no address was given", "k3dspark monitor HOST:8000")
    watched = Monitor(
        [address(url) for url in urls or []],
        interval if once else window,
        Costs(plain_step_ms and plain_step_ms / 1e3, round_ms and round_ms / 1e3),
        address(plain) if plain else None,
    )
    headers = dict(_header(text) for text in header or [])
    collector = SnapshotCollector(watched)
    if listen is not None:
        serve(collector, *listen_address(listen))
    polls = 2 if once else None if duration is None else max(int(duration / interval) + 1, 2)
    with Scraper(timeout, headers) as scraper:
        last = _loop(
            lambda: watched.poll(scraper, _read_npu_smi if npu_smi else None),
            collector.update, interval, polls, once, as_json,
        )  # fmt: skip
    if last is not None and not any(source.up for source in last.sources):
        faults = "; ".join(f"{source.source}: {source.fault}" for source in last.sources)
        raise EngineFault("nothing could be scraped", faults, "check that the engine runs, its port and the firewall")


@monitor.command()
def export(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A directory that is empty or new.")],
    engine: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="An engine to scrape; may be repeated.")
    ] = None,
    npu: Annotated[
        list[str] | None, typer.Option("--npu", metavar="HOST:PORT", help="An npu-exporter; may be repeated.")
    ] = None,
    dcgm: Annotated[
        list[str] | None, typer.Option("--dcgm", metavar="HOST:PORT", help="A DCGM exporter; may be repeated.")
    ] = None,
    service: Annotated[str, typer.Option(help="Name of the deployment: joins engines with their devices.")] = "dspark",
    block: Annotated[int, typer.Option(min=1, max=64, help="Draft tokens the draft was trained to propose.")] = 7,
    expected: Annotated[
        float | None,
        typer.Option(min=1.0, help="Expected acceptance length.", show_default="the average of the past week"),
    ] = None,
    plain_step_ms: Annotated[
        float | None,
        typer.Option("--plain-step-ms", min=0.001, help="Time of a plain step: adds the break-even alert."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Write scrape configuration, recording and alert rules, a Grafana dashboard and a runbook.

    The rules read the engines' own families and need no running monitor.
    """
    from k3dspark.monitoring.export import Deployment, write

    deployment = Deployment(
        service=service,
        engines=tuple(engine or ()),
        npu_exporters=tuple(npu or ()),
        dcgm_exporters=tuple(dcgm or ()),
        block=block,
        expected=expected,
        plain_step_seconds=plain_step_ms and plain_step_ms / 1e3,
    )
    files = write(out, deployment)
    if as_json:
        print_json({"format": 1, "directory": str(out), "files": [path.name for path in files]})
        return
    for path in files:
        print(clean(str(path)))


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise BadInput(f"--header {text!r} is no header", "it has no name before a colon", "write NAME:VALUE")
    return name.strip(), value.strip()


def _loop(
    poll: Callable[[], Snapshot],
    publish: Callable[[Snapshot], None],
    interval: float,
    polls: int | None,
    once: bool,
    as_json: bool,
) -> Snapshot | None:
    """Poll on a steady clock and show each snapshot, or only the last one."""
    from k3dspark.monitoring.snapshot import document
    from k3dspark.monitoring.view import plain_line, render

    live, next_time, done, last = None, time.monotonic(), 0, None
    if sys.stdout.isatty() and not once and not as_json:
        from rich.live import Live

        live = Live(auto_refresh=False)
        live.start()
    try:
        while polls is None or done < polls:
            if done:
                time.sleep(max(next_time - time.monotonic(), 0.0))
            next_time = max(next_time + interval, time.monotonic())
            last, done = poll(), done + 1
            publish(last)
            if once:
                continue
            if as_json:
                print(json.dumps(document(last)), flush=True)
            elif live is not None:
                live.update(render(last), refresh=True)
            else:
                print(clean(plain_line(last)), flush=True)
    finally:
        if live is not None:
            live.stop()
    if once and last is not None:
        if as_json:
            print_json(document(last))
        else:
            from rich.console import Console

            Console(highlight=False).print(render(last))
    return last


def _read_npu_smi() -> Sequence[Device]:
    """The chips that `npu-smi info` lists on this machine. Raises `EngineFault` when it lists none."""
    from k3dspark.deploy.command import run
    from k3dspark.deploy.npu_smi import parse_info
    from k3dspark.monitoring.devices import MIB, Device

    ran = run(["npu-smi", "info"], NPU_SMI_SECONDS)
    info = parse_info(ran.stdout)
    if not info.chips:
        why = info.complaint or ran.said or "it is not on PATH, or lists no chip"
        raise EngineFault(f"npu-smi info: {ran.outcome}", why, "run npu-smi info by hand")
    return [
        Device(
            "npu-smi",
            f"{chip.npu}.{chip.chip}",
            chip.name,
            None if chip.aicore_percent is None else chip.aicore_percent / 100,
            None if chip.memory_used_mb is None else chip.memory_used_mb * MIB,
            None if chip.memory_total_mb is None else chip.memory_total_mb * MIB,
            power_watts=chip.power_watts,
            temperature_celsius=chip.temperature_celsius,
            healthy=chip.healthy,
        )
        for chip in info.chips
    ]
