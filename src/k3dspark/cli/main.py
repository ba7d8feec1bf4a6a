"""The `k3dspark` program: the command table, and how an error, Ctrl-C or a closed pipe ends it."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from k3dspark import __version__
from k3dspark.errors import K3DSparkError

# Each name is a module of this folder, whose function of the same name is the command. The modules are thin: what
# a command needs is imported when it runs.
COMMANDS = (
    "fetch",
    "inspect",
    "explain",
    "synth",
    "generate",
    "serve",
    "bench",
    "train",
    "evaluate",
    "calibrate",
    "check",
    "plan",
    "launch",
    "tune",
    "monitor",
    "diagnose",
)

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CLOSED_PIPE = 141  # 128 + SIGPIPE


class _Commands(TyperGroup):
    """The command group, ending each command the way the user should see it end."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a pipe closed by its reader is noticed here, not at interpreter exit
            return result
        except K3DSparkError as error:
            print_error(error)
            raise typer.Exit(error.exit_status) from error
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whatever is still buffered has no reader: let the flush at exit go nowhere, quietly.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(CLOSED_PIPE) from None


app = typer.Typer(
    name="k3dspark",
    cls=_Commands,
    help="Run, train and compare DSpark draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"k3dspark {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _name in COMMANDS:
    _command = getattr(import_module(f"k3dspark.cli.{_name}"), _name)
    if isinstance(_command, typer.Typer):  # a command of several, as in `monitor export`
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)


def print_error(error: K3DSparkError) -> None:
    """What, why and remedy on stderr; no line is broken, so that paths and commands can be copied."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    for label, style, words in (
        ("error", "bold red", error.what),
        ("  why", "yellow", error.why),
        ("   do", "green", error.remedy),
    ):
        console.print(Text.assemble((f"{label}: ", style), words), soft_wrap=True)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 a comparison failed, 2 bad usage or input, 3 a fault."""
    try:
        app()
    except Exception:  # noqa: BLE001 - a bug of ours: never exit 1, which means "compared and found different"
        traceback.print_exc()
        print(
            f"\nk3dspark {__version__} hit a bug; the lines above are what a report of it needs.", file=sys.stderr
        )
        sys.exit(3)
    sys.exit(0)
