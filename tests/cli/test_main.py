"""How the program ends: its version, its errors, Ctrl-C and a closed pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

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
        case "place": open("/dev/null/x", "w")
        case "script": print("\\u672a")
        case "table":
            from rich.console import Console
            for line in range(100_000): Console().print(line)
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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (errors, process.returncode) == ("\ninterrupted\n", 130)


@pytest.mark.parametrize("ending", ["chatter", "table"])
def test_a_reader_that_leaves_early_is_no_error(ending: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "provoke", ending],
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--overhead-gb", "nan"),
        ("train", "--out", "x", "--seed", "9" * 20),
        ("train", "--out", "x", "--minutes", "inf"),
    ],
    ids=["nan", "beyond 64 bits", "infinite"],
)
def test_a_number_that_is_none_is_named(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert f"{arguments[-2]} {arguments[-1]}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_operating_system_refuses_is_told_with_its_place() -> None:
    done = run("provoke", "place")
    assert done.returncode == 2
    assert done.stderr.startswith("error: /dev/null/x: Not a directory")


def test_a_full_disk_behind_standard_output_is_told() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM, "provoke", "script"], stdout=full, stderr=subprocess.PIPE,
                              text=True, check=False, timeout=60)  # fmt: skip
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_output_that_its_encoding_lacks_is_escaped_and_a_closed_one_leads_nowhere() -> None:
    command = [sys.executable, "-c", PROGRAM, "provoke", "script"]
    latin = subprocess.run(command, capture_output=True, check=False, timeout=60,
                           env={**os.environ, "PYTHONIOENCODING": "latin-1"})  # fmt: skip
    assert (latin.stdout, latin.stderr, latin.returncode) == (b"\\u672a\n", b"", 0)
    shell = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, check=False, timeout=60)
    assert (shell.stderr, shell.returncode) == (b"", 0)


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = subprocess.run([sys.executable.encode(), b"-c", PROGRAM.encode(), b"provoke", b"\xff"],
                          capture_output=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: an argument is not text")
