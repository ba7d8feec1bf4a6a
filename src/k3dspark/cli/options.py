"""Options that several commands have, each written once: the pair, its compute, and how it speculates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3dspark.checkpoint.files import no_model_at
from k3dspark.errors import BadInput

if TYPE_CHECKING:
    from k3dspark.embedded.pair import ModelPair

SPECULATION = "Speculation"

Target = Annotated[
    Path | None, typer.Option("--target", metavar="DIR", help="The verified model.", show_default="the embedded one")
]
Draft = Annotated[
    Path | None, typer.Option("--draft", metavar="DIR", help="Its draft.", show_default="the embedded one")
]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")]
DTypeName = Literal["auto", "float32", "bfloat16", "int8"]
Dtype = Annotated[
    DTypeName,
    typer.Option("--dtype", help="Format of the weights; auto: bfloat16 on a CPU with units for it, else float32."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=4096, help="CPU threads.", show_default="as many as PyTorch chooses"),
]

ScheduleName = Annotated[
    Literal["full", "threshold", "cost"] | None,
    typer.Option(
        "--schedule",
        help="How many tokens of a block are verified: all, the likely ones, or what pays at costs measured now.",
        show_default="full",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    int | None, typer.Option("--draft-length", min=1, help="Always this many.", rich_help_panel=SPECULATION)
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold", min=0, max=1, help="Survival a slot needs.", show_default="0.1", rich_help_panel=SPECULATION
    ),
]
OnlineCalibration = Annotated[
    bool,
    typer.Option("--online-calibration", help="Let calibration follow the rounds.", rich_help_panel=SPECULATION),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="Step costs for --schedule cost; written if absent.",
        rich_help_panel=SPECULATION,
    ),
]

# Of the commands that watch an engine.
PlainUrl = Annotated[
    str | None,
    typer.Option("--plain", metavar="URL", help="A server of the same target without a draft, to compare with."),
]
PlainStep = Annotated[
    float | None, typer.Option("--plain-step-ms", min=0.001, help="Time of a plain decoding step at this load.")
]


def api_key(given: str | None) -> str | None:
    """The key for other people's servers: the option's, or that of the environment."""
    return given or os.environ.get("K3DSPARK_API_KEY") or os.environ.get("OPENAI_API_KEY")


def require_draft(target: Path | None, draft: Path | None, no_draft: bool | None = None) -> None:
    """Raise `BadInput` for a target without its draft; `no_draft` is None where a command cannot do without one."""
    if target is not None and draft is None and not no_draft:
        if not target.is_dir():
            raise no_model_at(target)
        raise BadInput(
            f"no draft for {target}",
            "the embedded draft fits the embedded target only",
            "pass --draft DIR" if no_draft is None else "pass --draft DIR, or --no-draft to decode plainly",
        )


def refuse_without_draft(no_draft: bool, **given: object) -> None:
    """Raise `BadInput` when --no-draft stands beside an option (by its parameter's name) about verifying a draft."""
    for name, value in given.items():
        if no_draft and value is not None:
            option = "--" + name.replace("_", "-")
            raise BadInput(f"{option} {value} with --no-draft", "plain decoding verifies no draft", "leave one out")


def load(
    target: Path | None,
    draft: Path | None,
    no_draft: bool,
    dtype: DTypeName,
    threads: int | None,
) -> ModelPair:
    """The pair that these options name."""
    from k3dspark.embedded.pair import load_embedded_pair, load_pair

    if target is None and draft is None:
        return load_embedded_pair(dtype=dtype, threads=threads, with_draft=not no_draft)
    return load_pair(target, None if no_draft else draft, dtype=dtype, threads=threads)
