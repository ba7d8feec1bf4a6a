"""How the program ends: its version, its errors, Ctrl-C and a closed pipe."""

from __future__ import annotations

import signal
import subprocess
import sys

from k3dspark import __version__

# The program with one more command, so that an ending can be provoked without loading a model.
PROGRAM = """
import sys
from k3dspark.cli import main
from k3dspark.errors import BadInput, CheckFailed, EngineFault

@main.app.command()
def provoke(ending: str) -> None:
    match ending:
        case "bad": raise BadInput("no [bold]file[/bold] /a/b", "x" * 100, "look /a/b")
        case "check": raise CheckFailed("they differ", "they must not", "report it")
        case "fault": raise EngineFault("it broke", "no memory", "buy some")
        case "bug": raise KeyError("surprise")
        case "wait":
            print("ready", flush=True)
            sys.stdin.read()
        case "chatter":
            for line in range(100_000): print(line)

main.main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_an_error_is_three_lines_and_its_status() -> None:
    done = run("provoke", "bad")
    assert done.stderr == f"error: no [bold]file[/bold] /a/b\n  why: {'x' * 100}\n   do: look /a/b\n"
    assert (done.stdout, done.returncode) == ("", 2)


def test_each_kind_of_error_has_its_status() -> None:
    assert [run("provoke", ending).returncode for ending in ("check", "fault")] == [1, 3]


def test_a_bug_is_never_mistaken_for_a_failed_comparison() -> None:
    done = run("provoke", "bug")
    assert done.returncode == 3
    assert "KeyError: 'surprise'" in done.stderr
    assert "hit a bug" in done.stderr


def test_an_unknown_option_is_bad_usage() -> None:
    done = run("generate", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_a_misspelt_command_is_answered_with_the_right_one() -> None:
    done = run("generat")
    assert done.returncode == 2
    assert "generate" in done.stderr


def test_interrupting_ends_with_one_line_and_status_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "provoke", "wait"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (errors, process.returncode) == ("\ninterrupted\n", 130)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "provoke", "chatter"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 141


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"k3dspark {__version__}\n"
