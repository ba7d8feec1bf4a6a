"""`k3dspark synth`: a random checkpoint with the real layout, to rehearse with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3dspark.cli.output import print_json, table
from k3dspark.cli.progress import Bytes


def synth(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A directory that is empty or new.")],
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Leave holes for the data: real sizes, no time and no space.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The layout in miniature, in DIR/draft, with its target in DIR/target.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Write a draft of random weights with the published names, shapes, order, header and byte sizes.

    For rehearsing downloads, checks, memory and launches: what it drafts is noise.
    """
    from k3dspark.checkpoint.synth import synthesise

    with Bytes() as progress:
        written = synthesise(
            out,
            tiny=tiny,
            sparse=sparse,
            seed=seed,
            progress=lambda done, total: progress.update("writing", done, total),
        )
    sizes = {path.relative_to(out).as_posix(): size for path, size in written.files.items()}
    if as_json:
        print_json({"format": 1, "directory": str(out), "files": [{"path": p, "bytes": b} for p, b in sizes.items()]})
        return
    from rich.console import Console

    console = Console(highlight=False)
    files = table(("file", "left"), ("bytes", "right"))
    for path, size in sizes.items():
        files.add_row(path, f"{size:,}")
    console.print(files)
    console.print(f"next: k3dspark inspect {out / 'draft' if tiny else out}", style="dim", soft_wrap=True)
