"""Drafts trained on a Kimi K3 of 93 layers: the right taps pay, wrong ones do not, and no token ever changes.

Takes about 40 minutes of one core: answers of the target, and three drafts trained on them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kimi_k3_draft.py"
WRONG = ("random", "other stream", "one layer late")


def test_only_a_draft_trained_on_the_taps_it_reads_is_accepted(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--out", str(tmp_path / "k3")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["different_answers"] > 10, "the answers must depend on the prompts"
    drafts = record["drafts"]
    assert all(draft["identical"] for draft in drafts.values())
    right = drafts["right"]["acceptance_length"]
    assert right > 1.25 * max(drafts[name]["acceptance_length"] for name in WRONG)
