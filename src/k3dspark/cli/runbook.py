"""`k3dspark runbook`: the founding checklist as one run, and what differs between two of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from k3dspark.cli import options
from k3dspark.cli.output import clean, print_json, table

runbook = typer.Typer(help="Run the whole checklist into an archive; compare two archives.", no_args_is_help=True)

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
Lang = Annotated[Literal["en", "zh"], typer.Option(help="Language of the report.")]


@runbook.command()
def run(
    archive: Annotated[Path, typer.Argument(metavar="DIR", help="Where the run is kept; one that stopped goes on.")],
    target: options.Target = None,
    draft: options.Draft = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The engine to watch.", show_default="our own server, for the moment"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, one a line, 12 or more.", show_default="built in"),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths of accept; those that fit.")] = "1K,32K,128K",
    per_length: Annotated[int, typer.Option(min=1, max=100, help="Prompts at each length.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    lang: Lang = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print the run as one JSON object.")] = False,
) -> None:
    """Run fetch (verified), inspect, check, load, map, cache, confidence, accept, monitor; each is kept as it ends.

    Exit status: 0 every step passed or warns, 1 a step failed, 2 unusable input.
    """
    options.require_draft(target, draft)

    import torch

    from k3dspark.runbook import report
    from k3dspark.runbook.archive import Archive
    from k3dspark.runbook.asked import Asked
    from k3dspark.runbook.run import run as run_steps

    if threads is not None:
        torch.set_num_threads(threads)
    asked = Asked(target, draft, url, prompts, dtype, lengths, per_length, new_tokens, seed)

    asked.texts()  # refused before anything runs

    def began(step: str, kept: bool) -> None:
        print(f"{step}: {'kept from before' if kept else 'running'}", file=sys.stderr, flush=True)

    record = run_steps(asked, Archive(archive), began)
    report.write(record, archive, lang)
    if as_json:
        print_json(record.as_json())
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        words = report.WORDS[lang]
        lines = table((words["step"], "left"), (words["status"], "left"), (words["found"], "left"))
        for (step, status, found), outcome in zip(report.rows(record, lang), record.outcomes.values(), strict=True):
            lines.add_row(step, Text(status, _STYLES[outcome.status]), Text(clean(found)))
        console.print(lines)
        for outcome in record.outcomes.values():
            for line in outcome.advice if outcome.status == "fail" else ():
                console.print(Text(clean(line), "yellow"), soft_wrap=True)
        console.print(Text(report.verdict(record, lang), "bold green" if record.passed else "bold red"))
    if not record.passed:
        raise typer.Exit(1)


@runbook.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="DIR", help="An archived run.")],
    right: Annotated[Path, typer.Argument(metavar="DIR", help="Another, of a new node.")],
    lang: Lang = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what differs between two runs, and what a differing config field affects.

    Exit status: 0 nothing differs, 1 something does, 2 one is no archive.
    """
    from k3dspark.runbook.archive import Archive
    from k3dspark.runbook.diff import differences
    from k3dspark.runbook.run import read

    found = differences(read(Archive(left)), read(Archive(right)), lang)
    if as_json:
        print_json(found.as_json())
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for item in found.causes:
            change = f"{item.fact}: {item.left} → {item.right}"
            console.print(Text(clean(change), "bold red"), soft_wrap=True)
            for line in (item.affects, item.breaks):
                console.print(Text(f"  {clean(line)}") if line else "", soft_wrap=True, end="\n" if line else "")
        rows = table(("step", "left"), ("fact", "left"), (clean(left.name), "left"), (clean(right.name), "left"))
        for item in (*found.effects, *found.asked):
            rows.add_row(item.step, *(Text(clean(str(cell))) for cell in (item.fact, item.left, item.right)))
        if found.effects or found.asked:
            console.print(rows)
        for step in found.unfinished:
            console.print(Text(f"{step}: only one of the two has it", "yellow"))
        if found.same:
            console.print(Text("nothing differs", "green"))
    if not found.same:
        raise typer.Exit(1)
