"""Twelve faults planted in the embedded pair are named; the healthy pair is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis.faults import planted
from diagnosis.small_pair import copy
from k3dspark.diagnosis.capture import Conversation
from k3dspark.diagnosis.experiment import Experiment, ExperimentSettings, experiment
from k3dspark.diagnosis.prompts import PROMPTS
from k3dspark.diagnosis.subject import Subject, open_subject
from k3dspark.diagnosis.wiring import Stream
from k3dspark.embedded.pair import EMBEDDED_DRAFT

pytestmark = [pytest.mark.integration, pytest.mark.long]

FAULTS = planted(mask=17)
# This draft is as good without YaRN, without its scale and with a causal block: at short contexts there is no fault.
HARMLESS = ("yarn_missing", "yarn_scale", "block_mask")
TWELVE = [name for name in FAULTS if name not in HARMLESS]


class Recorded:
    """The target's answers, made once for all tests."""

    streams: tuple[Stream, ...] = ("prefix",)

    def __init__(self, subject: Subject) -> None:
        self.layers = subject.recorder.layers
        ids = [subject.prompt_ids(prompt) for prompt in PROMPTS]
        tokens = ExperimentSettings().new_tokens
        self._answers = subject.recorder.record(ids, tokens, subject.stop_ids, self.layers)

    def record(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_ids: Sequence[int], layers: Sequence[int]
    ) -> list[Conversation]:
        return self._answers


@pytest.fixture(scope="module")
def healthy() -> Subject:
    subject = open_subject(None, None, "float32")
    return replace(subject, recorder=Recorded(subject))


def diagnosed(fault: str, healthy: Subject, place: Path) -> Experiment:
    broken = copy(EMBEDDED_DRAFT, place)
    FAULTS[fault](broken, healthy.wiring)
    return experiment(replace(open_subject(None, broken, "float32"), recorder=healthy.recorder), PROMPTS)


def test_the_healthy_pair_is_left_alone(healthy: Subject) -> None:
    found = experiment(healthy, PROMPTS)
    assert (found.verdict, found.causes) == ("nothing_wrong", ())


def test_eleven_of_twelve_faults_are_named_first(healthy: Subject, tmp_path: Path) -> None:
    named = {}
    for fault in TWELVE:
        causes = diagnosed(fault, healthy, tmp_path / fault).causes
        named[fault] = causes[0].candidate.change if causes else None
    assert len(TWELVE) == 12
    assert sum(fault == name for fault, name in named.items()) >= 11, named


@pytest.mark.parametrize("fault", HARMLESS)
def test_no_other_cause_is_made_up_for_what_does_no_harm(fault: str, healthy: Subject, tmp_path: Path) -> None:
    found = diagnosed(fault, healthy, tmp_path / fault)
    assert {cause.candidate.change for cause in found.causes} <= {fault}
