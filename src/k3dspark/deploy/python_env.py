"""The Python that serves: its version, and the engines and frameworks installed in it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Final

from k3dspark.deploy.command import run
from k3dspark.deploy.engines import ENGINES

# Besides the engines: what they compute with.
FRAMEWORKS: Final = ("torch", "torch-npu", "transformers", "triton-ascend", "modelscope")
DISTRIBUTIONS: Final = (*(name for engine in ENGINES.values() for name in engine.distributions), *FRAMEWORKS)

_PROGRAM: Final = """
import json, platform, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except Exception:
        pass
print(json.dumps({"python": platform.python_version(), "found": found}))
"""


@dataclass(frozen=True)
class PythonFacts:
    """`distributions` maps names as in `DISTRIBUTIONS` to versions; `problem` is why another Python is silent."""

    program: str
    version: str
    distributions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def read_python(program: str | None, timeout_seconds: float) -> PythonFacts:
    """Ask this Python, or the one that `program` starts, without importing what is installed."""
    if program is None:
        return PythonFacts("", platform.python_version(), _installed())
    asked = run([program, "-c", _PROGRAM, *DISTRIBUTIONS], timeout_seconds)
    try:
        answer = json.loads(asked.stdout.splitlines()[-1]) if asked.outcome == "ok" else {}
        found = {str(name): str(version) for name, version in answer["found"].items()}
        return PythonFacts(program, str(answer["python"]), found)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        return PythonFacts(program, "", {}, asked.said or f"it is {asked.outcome}")


def _installed() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if isinstance(version, str):  # metadata without a Version line gives None
            found[name] = version
    return found
