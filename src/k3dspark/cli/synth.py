"""`k3dspark synth`: a random checkpoint with the real layout, to rehearse with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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
    mini_k3: Annotated[
        bool, typer.Option("--mini-k3", help="The same, with a Kimi K3 of all 93 layers in miniature as target.")
    ] = False,
    stream: Annotated[
        Literal["prefix", "attn_res"], typer.Option(help="With --mini-k3: what its draft taps of the target.")
    ] = "prefix",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Write a draft of random weights with the published names, shapes, order, header and byte sizes.

    For rehearsing downloads, checks, memory and launches: what it drafts is noise.
    """
    from k3dspark.checkpoint.synth import synthesise
    from k3dspark.errors import BadInput

    if stream != "prefix" and not mini_k3:
        raise BadInput(f"--stream {stream} without --mini-k3", "only Kimi K3 has two streams", "add --mini-k3")

    with Bytes() as progress:
        written = synthesise(
            out,
            tiny=tiny,
            mini_k3=stream if mini_k3 else None,
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
    console.print(f"next: k3dspark inspect {out / 'draft' if tiny or mini_k3 else out}", style="dim", soft_wrap=True)
