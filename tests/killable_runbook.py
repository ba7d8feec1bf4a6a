"""A run of the checklist that holds still at a step, to be killed there: killable_runbook.py TARGET DRAFT ARCHIVE.

The prompts lie beside the target.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from k3dspark.runbook.archive import Archive
from k3dspark.runbook.asked import Asked
from k3dspark.runbook.run import run

HELD_AT = "confidence"


def asked(target: Path, draft: Path) -> Asked:
    return Asked(
        target, draft, prompts=target.parent / "prompts.txt", dtype="float32", lengths="64", per_length=2, new_tokens=24
    )


def hold(step: str, kept: bool) -> None:
    if step == HELD_AT:
        print("holding", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    target, draft, archive = map(Path, sys.argv[1:4])
    run(asked(target, draft), Archive(archive), hold)
