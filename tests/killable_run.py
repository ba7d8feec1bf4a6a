"""A training run that holds still at a step, to be killed there: killable_run.py TARGET DATA OUT PROCESSES."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from k3dspark.training.pipeline import TrainJob, train
from k3dspark.training.trainer import ShortBlocks, TrainSettings
from small_training import SHAPE

STEPS, CHECKPOINT_EVERY, HELD_AT = 26, 8, 20  # two checkpoints lie behind, and four steps will be lost


def job(target: Path, data: Path, out: Path, processes: int) -> TrainJob:
    settings = TrainSettings(
        steps=STEPS, sequences=4, anchors=4, optimiser="muon", checkpoint_every=CHECKPOINT_EVERY, evaluate_every=12,
        short=ShortBlocks(steps=10, block_size=3),
    )  # fmt: skip
    return TrainJob(target, out, data, answer_tokens=0, processes=processes, shape=SHAPE, settings=settings)


def quiet(stage: str, metrics: dict[str, Any]) -> None:
    """A report that can be sent to worker processes."""


def hold(stage: str, metrics: dict[str, Any]) -> None:
    if metrics["step"] == HELD_AT:
        print("holding", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    target, data, out = map(Path, sys.argv[1:4])
    train(job(target, data, out, int(sys.argv[4])), hold)
