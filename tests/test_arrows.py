"""The house rules that a reader relies on: which room may import which, and what stays out of a fast start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import k3dspark
from k3dspark.cli.main import COMMANDS

SOURCE = Path(k3dspark.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

_STACK = ("checkpoint", "model", "target", "decoding", "embedded")
_ABOVE = ("serving", "training", "acceptance", "diagnosis")
_BESIDE = ("deploy", "monitoring")
MAY_IMPORT: dict[str, set[str]] = {
    "": {"checkpoint"},  # the page of a report is written as every other file is
    **{room: set(_STACK[:index]) for index, room in enumerate(_STACK)},
    **{room: set(_STACK) for room in _ABOVE},
    **{room: {"checkpoint"} for room in _BESIDE},
    "vllm_plugin": {"checkpoint", "model"},  # it runs inside vLLM, which has its own target and engine
    "runbook": {*_STACK, *_ABOVE, *_BESIDE},
    "cli": {*_STACK, *_ABOVE, *_BESIDE, "runbook"},
}
OPEN = ("errors", "page", "__version__")  # at the top: for every room
LIGHT_ROOMS = ("checkpoint", *_BESIDE)
HEAVY = {"torch", "transformers", "accelerate", "gguf", "fastapi", "plotly"}


def room_of(path: Path) -> str:
    """The folder of src/k3dspark that a file lives in; '' for the files at the top."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that the imports below a node bind, relative ones resolved against `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from k3dspark import model` names a room in its list
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == "k3dspark" else (base,)


def package_of(path: Path) -> str:
    return ".".join(["k3dspark", *path.relative_to(SOURCE).parent.parts])


def at_import_time(tree: ast.Module) -> ast.Module:
    """The module without the bodies of its functions and of `if TYPE_CHECKING`, which importing it does not run."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            named = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            return None if "TYPE_CHECKING" in named else self.generic_visit(node)

    return Strip().visit(tree)


def heavy(names: Iterator[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in HEAVY or name == "safetensors.torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_between_rooms_point_one_way(path: Path) -> None:
    room = room_of(path)
    names = imported(ast.parse(path.read_text()), package_of(path))
    rooms = {name.split(".")[1] for name in names if name.startswith("k3dspark.")} - {*OPEN, room}
    allowed = MAY_IMPORT.get(room, set())
    assert rooms <= allowed, f"{room or 'the top level'} may import {sorted(allowed)}, not {sorted(rooms - allowed)}"


def test_every_room_is_known_and_says_what_it_is_for() -> None:
    rooms = {path.parent for path in FILES if room_of(path)}
    assert {room.relative_to(SOURCE).parts[0] for room in rooms} <= set(MAY_IMPORT) - {""}
    silent = [room.name for room in rooms if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))]
    assert silent == []


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_never_import_torch(room: str) -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in FILES
        if room_of(path) == room and (names := heavy(imported(ast.parse(path.read_text()), package_of(path))))
    }
    assert found == {}


def test_the_command_line_imports_nothing_heavy_before_a_command_runs() -> None:
    found = {
        path.name: names
        for path in FILES
        if room_of(path) in ("cli", "")
        and (names := heavy(imported(at_import_time(ast.parse(path.read_text())), package_of(path))))
    }
    assert found == {}


QUICK = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from k3dspark.cli.main import main\n"
        f"sys.argv = ['k3dspark', *{arguments}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('loaded:', sorted(set(sys.modules) & {'torch', 'transformers', 'numpy'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
