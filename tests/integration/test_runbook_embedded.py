"""The checklist on the embedded pair: killed half way it goes on, and `diff` names the one field that was changed.

Quiet core: about ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diagnosis.small_pair import change_config, copy
from k3dspark.diagnosis.prompts import PROMPTS
from k3dspark.embedded.pair import EMBEDDED_DRAFT
from k3dspark.runbook.steps import STEPS

pytestmark = pytest.mark.integration

PROGRAM = [sys.executable, "-c", "from k3dspark.cli.main import main; main()"]
HALF_WAY = "map"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS[:16]))
    return path


def command(archive: Path, draft: Path, prompts: Path) -> list[str]:
    options = {"--draft": draft, "--prompts": prompts, "--lengths": "256", "--per-length": 1, "--new-tokens": 24,
               "--dtype": "float32"}  # fmt: skip
    return [*PROGRAM, "runbook", "run", str(archive), "--json", *(str(w) for pair in options.items() for w in pair)]


def written(archive: Path) -> dict[str, int]:
    """When each step was archived, in nanoseconds."""
    return {path.stem: path.stat().st_mtime_ns for path in (archive / "steps").glob("*.json")}


def kill_half_way(words: list[str], archive: Path) -> dict[str, int]:
    """Start the run, kill it as soon as a step in the middle is archived; what it had written."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while HALF_WAY not in written(archive):
            assert process.poll() is None
            time.sleep(0.2)
        process.kill()
    return written(archive)


def outcomes(answer: str) -> dict[str, dict[str, Any]]:
    return {step["step"]: step for step in json.loads(answer)["steps"]}


def test_a_killed_run_goes_on_and_diff_names_the_changed_field(tmp_path: Path, prompts: Path) -> None:
    late = copy(EMBEDDED_DRAFT, tmp_path / "late")
    taps = json.loads((late / "config.json").read_text())["target_layer_ids"]
    change_config(late, target_layer_ids=[layer + 1 for layer in taps])
    one, other = tmp_path / "one", tmp_path / "other"

    with subprocess.Popen(command(other, late, prompts), stdout=subprocess.PIPE, text=True) as changed:
        before = kill_half_way(command(one, EMBEDDED_DRAFT, prompts), one)
        assert set(before) == set(list(STEPS)[: len(before)])
        assert len(before) < len(STEPS)
        resumed = subprocess.run(command(one, EMBEDDED_DRAFT, prompts), stdout=subprocess.PIPE, text=True, check=False)
        told_other, _ = changed.communicate()

    found = outcomes(resumed.stdout)
    assert list(found) == list(STEPS)
    assert {step: found[step]["status"] for step in STEPS if found[step]["status"] == "fail"} == {}
    assert found["accept"]["facts"]["outcome"] == "identical"
    assert {step: written(one)[step] for step in before} == before, "what was archived is kept"
    # The late taps are named by the step that looks for them, and harm no answer.
    assert outcomes(told_other)["map"]["status"] == "fail"
    assert outcomes(told_other)["accept"]["facts"]["outcome"] == "identical"

    done = subprocess.run(
        [*PROGRAM, "runbook", "diff", str(one), str(other), "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert {cause["fact"] for cause in told["causes"]} == {"config.target_layer_ids"}
    affected = {(effect["step"], effect["fact"]) for effect in told["effects"]}
    assert {("map", "acceptance_length"), ("confidence", "acceptance_length")} <= affected
    assert ("accept", "outcome") not in affected
