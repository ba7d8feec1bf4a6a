"""`k3dspark fetch`: a checkpoint from a repository, a hub or a folder, verified."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from k3dspark.cli.output import clean, print_json, table
from k3dspark.cli.progress import Bytes


def fetch(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The directory to fill.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="git:URL, modelscope:ORG/NAME, hf:ORG/NAME, or a directory.",
            show_default="the published modelscope:Eco-Tech/Kimi-K3-DSpark-MLA-NPU",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="A branch, tag or commit.", show_default="the newest")
    ] = None,
    repull: Annotated[
        bool, typer.Option("--repull", help="Complete what is there: a clone without its LFS objects, an old fetch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Download a checkpoint, resuming an earlier run, and verify every file by size and hash.

    A file takes its place only when it is whole. What came from where is recorded in DIR/.k3dspark/manifest.json, so
    that `k3dspark inspect --verify` can check it again offline.
    """
    from k3dspark.checkpoint.fetch import fetch as run

    with Bytes() as progress:
        manifest = run(
            source,
            to,
            revision=revision,
            repull=repull,
            report=lambda moment: progress.update(moment.stage, moment.done, moment.total),
        )
    if as_json:
        print_json({"format": 1, "directory": str(to), **asdict(manifest)})
        return
    from rich.console import Console

    console = Console(highlight=False)
    files = table(("file", "left"), ("bytes", "right"), ("sha256", "left"), ("stated by", "left"))
    for file in manifest.files:
        files.add_row(clean(file.path), f"{file.size:,}", f"{file.sha256[:16]}…", file.stated_by)
    console.print(files)
    at = f" at {manifest.revision}" if manifest.revision else ""
    console.print(f"verified {len(manifest.files)} files from {manifest.source}{at} in {to}", soft_wrap=True)
    console.print(f"next: k3dspark inspect {to}", style="dim", soft_wrap=True)
