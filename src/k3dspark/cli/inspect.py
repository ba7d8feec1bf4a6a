"""`k3dspark inspect`: a draft's directory judged from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import clean, print_json, table

if TYPE_CHECKING:
    from k3dspark.checkpoint.findings import Finding
    from k3dspark.checkpoint.inspection import FileReport, Inspection

_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "dim"}


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The draft's directory.")],
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also check the draft against this target's directory.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also hash the weights and compare with what fetch recorded.")
    ] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the kind of every single field, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Tell whether a checkpoint is whole and consistent, and what to do if it is not.

    Reads headers, never the weights, so it takes milliseconds. Exit status: 0 whole, 1 faults were found, 2 there is
    nothing to inspect.
    """
    from k3dspark.checkpoint.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(directory, target, verify)
    if as_json:
        from k3dspark.checkpoint.report import inspection_as_json

        print_json(inspection_as_json(inspection))
    else:
        _print(inspection, rules)
    if not inspection.complete:
        raise typer.Exit(1)


def _print(inspection: Inspection, every_rule: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    files = table(("file", "left"), ("what", "left"), ("bytes", "right"), ("expected", "right"), ("tensors", "right"))
    for file in inspection.files:
        files.add_row(*(clean(cell) for cell in _file_row(file)))
    console.print(files)
    for file in inspection.files:
        if file.size_rule and file.expected_bytes is not None:
            console.print(f"  {file.name}: {file.size_rule} = {file.expected_bytes:,}", style="dim", soft_wrap=True)
    console.print()
    _print_tensors(console, inspection)
    if inspection.verdicts:
        _print_rules(console, inspection, every_rule)
    for finding in inspection.findings:
        _print_finding(console, finding)
    errors = sum(finding.level == "error" for finding in inspection.findings)
    warnings = len(inspection.findings) - errors
    also = f", {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    if errors:
        console.print(f"not usable as it is: {errors} fault{'s' * (errors != 1)}{also}", style="bold red")
    else:
        console.print(f"the layout is complete{also}", style="bold green")


def _file_row(file: FileReport) -> tuple[str, str, str, str, str]:
    expected = "" if file.expected_bytes is None else f"{file.expected_bytes:,}"
    if file.pointer is not None:
        return file.name, file.kind, f"{file.bytes:,}", f"{file.pointer.size:,}", ""
    return file.name, file.kind, f"{file.bytes:,}", expected, "" if file.tensors is None else str(file.tensors)


def _print_tensors(console: Any, inspection: Inspection) -> None:
    counts = table(("", "left"), ("tensors", "right"), ("parameters", "right"), ("bytes of data", "right"))
    sides = {"config asks for": inspection.expected, "found": inspection.found}
    for name, side in sides.items():
        if side is not None:
            counts.add_row(name, f"{side.tensors:,}", f"{side.parameters:,}", f"{side.bytes:,}")
    console.print(counts)
    public = inspection.public
    if inspection.config is None:
        return
    if public is None:
        console.print("geometry: its own, not that of a public K3 draft", soft_wrap=True)
    else:
        console.print(f"geometry: {', '.join(public.names)}", soft_wrap=True)
        console.print(f"          {public.note}", soft_wrap=True)
        console.print(f"          this project {'runs it' if public.runs else 'does not run it'}", soft_wrap=True)
    console.print()


def _print_rules(console: Any, inspection: Inspection, every_rule: bool) -> None:
    from rich.text import Text

    kinds = [verdict for verdict in inspection.verdicts if verdict.rule.id.startswith("kind.")]
    relations = [verdict for verdict in inspection.verdicts if not verdict.rule.id.startswith("kind.")]
    lines = Text("rules of config.json\n", "bold")
    if not every_rule:
        passed = sum(verdict.status == "pass" for verdict in kinds)
        lines.append(f"  pass  kind.*: {passed} of {len(kinds)} fields are of their kind and within their bounds\n")
        kinds = [verdict for verdict in kinds if verdict.status != "pass"]
    for verdict in [*kinds, *relations]:
        rule = verdict.rule
        found = "" if verdict.status == "pass" else f" ({verdict.found})"
        lines.append(f"  {verdict.status}  ", _STYLES[verdict.status])
        lines.append(clean(f"{rule.id}: {verdict.field}: {rule.must}{found}\n"))
    console.print(lines, soft_wrap=True)


def _print_finding(console: Any, finding: Finding) -> None:
    from rich.text import Text

    label, style = ("fault", "bold red") if finding.level == "error" else ("warning", "bold yellow")
    for name, look, words in (
        (label, style, f"{finding.what}  [{finding.id}]"),
        ("why", "yellow", finding.why),
        ("do", "green", finding.remedy),
    ):
        console.print(Text.assemble((f"{name:>7}: ", look), clean(words)), soft_wrap=True)
    console.print()
