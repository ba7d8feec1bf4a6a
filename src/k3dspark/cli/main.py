"""The `k3dspark` program: the command table, and how an error, Ctrl-C or a closed pipe ends it."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from k3dspark import __version__
from k3dspark.errors import BadInput, K3DSparkError

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
    "accept",
    "runbook",
)

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CLOSED_PIPE = 141  # 128 + SIGPIPE

_REMEDIES: Final = {
    errno.ENOSPC: "free some space, or name a place on another disk",
    errno.EDQUOT: "free some space, or name a place on another disk",
    errno.EACCES: "name a place that this user may use",
    errno.EPERM: "name a place that this user may use",
    errno.EROFS: "name a place on a disk that can be written",
    errno.ENOTDIR: "a part of this path is a file: name a folder there",
    errno.ENOENT: "correct the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class _Command(TyperCommand):
    """A command whose numbers are numbers: not nan, not infinite, no integer that 64 bits cannot hold."""

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            for number in value if isinstance(value, (list, tuple)) else (value,):
                option = "--" + name.replace("_", "-")
                if isinstance(number, float) and not math.isfinite(number):
                    raise BadInput(f"{option} {number}", "that is no number to count with", "give a finite number")
                most = 2 ** (64 if name == "seed" else 63)
                if isinstance(number, int) and not -(2**63) <= number < most:
                    raise BadInput(f"{option} {number}", "it does not fit into 64 bits", "give a smaller number")
        return super().invoke(ctx)


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
            raise _closed_pipe() from None
        except OSError as error:
            if error.errno is None:  # a library's own error that only inherits the name
                raise
            print_error(_refused(error))
            _discard_output()
            raise typer.Exit(BadInput.exit_status) from error
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # rich ends the program itself, with status 1
                raise _closed_pipe() from None
            raise


def _closed_pipe() -> typer.Exit:
    _discard_output()
    return typer.Exit(CLOSED_PIPE)


def _discard_output() -> None:
    """Whatever is still buffered cannot be written: let the flush at exit go nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> BadInput:
    """An error of the operating system that no command foresaw, in our three parts."""
    number = error.errno or 0
    return BadInput(
        f"{error.filename or 'the output'}: {error.strerror or os.strerror(number)}",
        f"the operating system refused it ({errno.errorcode.get(number, number)})",
        _REMEDIES.get(number, "correct the path, or look at the disk it is on"),
    )


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
        for _part in _command.registered_commands:
            _part.cls = _Command
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, cls=_Command)(_command)


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
    _prepare_streams()
    for argument in sys.argv[1:]:
        if any("\ud800" <= character <= "\udfff" for character in argument):  # bytes that Python could not decode
            print_error(BadInput(f"an argument is not text: {argument!a}", "its bytes are not UTF-8", "convert it"))
            sys.exit(BadInput.exit_status)
    try:
        app()
    except Exception:  # noqa: BLE001 - a bug of ours: never exit 1, which means "compared and found different"
        traceback.print_exc()
        print(f"\nk3dspark {__version__} hit a bug; the lines above are what a report of it needs.", file=sys.stderr)
        sys.exit(3)
    sys.exit(0)


def _prepare_streams() -> None:
    """Streams that can always be written and read: one that was closed leads nowhere, one that is not UTF-8 escapes.

    A stream replaced by a test is left as it is.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(descriptor)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            stream.reconfigure(errors="backslashreplace")
