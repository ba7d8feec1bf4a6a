"""`k3dspark check`: the deployment checklist, item by item."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import clean, print_json, table

if TYPE_CHECKING:
    from k3dspark.deploy.facts import Facts
    from k3dspark.deploy.items import Item, Worded


class Lang(StrEnum):
    """Languages of the report."""

    EN = "en"
    ZH = "zh"


class Device(StrEnum):
    """Kinds of device."""

    NPU = "npu"
    CUDA = "cuda"
    CPU = "cpu"


_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "na": "dim"}
_TONES = {"pass": "good", "fail": "bad", "warn": "warn", "na": "dim"}


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The draft's directory.")],
    target: Annotated[Path | None, typer.Option(metavar="DIR", help="The target's directory.")] = None,
    device: Annotated[
        Device | None, typer.Option(help="Kind of device to check.", show_default="what is found here")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="All nodes of the cluster; asked over ssh without a password.")
    ] = None,
    ports: Annotated[str, typer.Option(metavar="N,…", help="Ports that the engine will listen on.")] = "8000",
    python: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="The Python that serves.", show_default="this one")
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also run every operator on the device against fp32.")] = False,
    links: Annotated[bool, typer.Option("--links", help="Also measure what a link carries.")] = False,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node's place in --nodes, for --links.", show_default="by its name")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once, for the links' load.")] = 64,
    step_ms: Annotated[float, typer.Option(min=0.01, help="One decoding step of the target without a draft.")] = 20.0,
    verify: Annotated[bool, typer.Option("--verify", help="Also hash the draft's weights.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a tool or node may take to answer.")] = 20.0,
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Read version files and /proc below this directory.")
    ] = Path("/"),
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    lang: Annotated[Lang, typer.Option(help="Language of the report.")] = Lang.EN,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Tell whether machine, driver, engine, target and draft fit together, and what to do where they do not.

    Exit status: 0 everything passed or warns, 1 a check failed, 2 there is nothing to check.
    """
    from k3dspark.deploy.checklist import judge
    from k3dspark.deploy.facts import Request, gather, guess_device
    from k3dspark.deploy.host import parse_ports
    from k3dspark.deploy.nodes import parse_nodes

    kind = device.value if device is not None else guess_device(timeout)
    names = parse_nodes(nodes) if nodes is not None else ()
    facts = gather(Request(directory, target, kind, names, parse_ports(ports), python, root, timeout, verify))
    items = [*judge(facts)]
    items += _links(facts, links, names, node_rank, requests, step_ms, timeout)
    items += _operators(facts, kind) if ops else []
    if report is not None:
        _write_report(report, facts, items, lang.value)
    if as_json:
        _print_json(facts, items, lang.value)
    else:
        _print(items, lang.value)
    if any(item.status == "fail" for item in items):
        raise typer.Exit(1)


def _links(
    facts: Facts,
    measure: bool,
    nodes: tuple[str, ...],
    rank: int | None,
    requests: int,
    step_ms: float,
    timeout: float,
) -> list[Item]:
    from k3dspark.deploy.accelerators import read_hccs_of
    from k3dspark.deploy.links import load_of
    from k3dspark.deploy.measured_checks import link_items

    config = _usable_config(facts)
    if config is None:
        return []
    measured = []
    if measure:
        from k3dspark.model.link_probe import probe_links

        measured = probe_links(facts.device, nodes, rank)
    hccs = read_hccs_of(facts.npus.info, timeout) if measure and facts.npus is not None else {}
    return [*link_items(load_of(config, requests, step_ms), requests, measured, hccs)]


def _operators(facts: Facts, device: str) -> list[Item]:
    from k3dspark.deploy.measured_checks import operator_items
    from k3dspark.model.op_check import check_operators

    return [*operator_items(check_operators(device, _usable_config(facts)))]


def _usable_config(facts: Facts) -> dict[str, Any] | None:
    """The draft's config, unless a rule of it is broken."""
    broken = any(verdict.status == "fail" for verdict in facts.draft.verdicts)
    return None if broken else facts.draft.config


def _worded(items: list[Item], lang: str) -> list[Worded]:
    from k3dspark.deploy.items import word

    return [word(item, "zh" if lang == "zh" else "en") for item in items]


def _print_json(facts: Facts, items: list[Item], lang: str) -> None:
    from k3dspark.deploy.items import as_json

    about = {
        "directory": str(facts.draft.directory),
        "target": None if facts.target is None else str(facts.target.directory),
        "device": facts.device,
        "lang": lang,
    }
    print_json({**as_json(items, "zh" if lang == "zh" else "en"), **about})


def _wording(lang: str) -> Any:
    if lang == "zh":
        from k3dspark.deploy import wording_zh

        return wording_zh
    from k3dspark.deploy import wording_en

    return wording_en


def _print(items: list[Item], lang: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from k3dspark.deploy.items import counts

    words, console = _wording(lang), Console(highlight=False)
    rows = table(*((name, "left") for name in words.COLUMNS))
    section = None
    worded = _worded(items, lang)
    for line in worded:
        if line.item.section != section:
            section = line.item.section
            rows.add_row("", Text(words.SECTIONS[section], "bold"), "")
        style = _STYLES[line.item.status]
        mark = Text(words.STATUSES[line.item.status], style)
        rows.add_row(mark, "  " + clean(line.title), Text(clean(line.evidence), "dim" if style == "dim" else ""))
    console.print(rows)
    for line in worded:
        if line.item.status in ("warn", "fail") and line.remedy:
            style = _STYLES[line.item.status]
            console.print(
                Text.assemble(
                    (f"{words.STATUSES[line.item.status]}: ", style),
                    f"{clean(words.SECTIONS[line.item.section])} · {clean(line.title)}\n",
                    (f"  {words.LABELS['remedy']}: ", "green"),
                    clean(line.remedy),
                ),
                soft_wrap=True,
            )
    total = counts(items)
    verdict, style = ("bad", "bold red") if total["fail"] else ("ok", "bold green")
    summary = words.LABELS["summary"].format_map(total)
    console.print(Text(f"\n{words.LABELS[verdict]}: {summary}", style), soft_wrap=True)


def _write_report(path: Path, facts: Facts, items: list[Item], lang: str) -> None:
    from k3dspark.deploy.items import SECTIONS, counts
    from k3dspark.page import Page

    words, total = _wording(lang), counts(items)
    page = Page(words.LABELS["title"], f"{facts.draft.directory} · {facts.device}", lang)
    summary = words.LABELS["summary"].format_map(total)
    page.text(f"{words.LABELS['bad' if total['fail'] else 'ok']}: {summary}", "bad" if total["fail"] else "good")
    worded = _worded(items, lang)
    for section in SECTIONS:
        lines = [line for line in worded if line.item.section == section]
        if lines:
            page.heading(words.SECTIONS[section])
            rows = [(line.title, words.STATUSES[line.item.status], clean(line.evidence)) for line in lines]
            page.table((words.COLUMNS[1], "", words.COLUMNS[2]), rows, text_columns=(1, 2))
    troubled = [line for line in worded if line.item.status in ("fail", "warn") and line.remedy]
    if troubled:
        page.heading(words.LABELS["remedies"])
        for line in troubled:
            title = f"{words.STATUSES[line.item.status]} · {words.SECTIONS[line.item.section]} · {line.title}"
            page.text(title, _TONES[line.item.status])
            page.text(clean(line.remedy))
    page.write(path)
