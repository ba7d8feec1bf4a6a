"""Planted faults in a tiny pair are named; a healthy one is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.faults import planted
from diagnosis.small_pair import NEW_TOKENS, PROMPTS, copy, write_pair
from k3dspark.diagnosis.capture import BatchRecorder, EngineRecorder
from k3dspark.diagnosis.experiment import Experiment, ExperimentSettings, experiment
from k3dspark.diagnosis.subject import Subject, open_subject
from k3dspark.errors import BadInput
from k3dspark.target.llama import LlamaTarget
from tiny_models import write_draft

FAULTS = planted(mask=65)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def healthy(pair: tuple[Path, Path]) -> Subject:
    return open_subject(*pair, "float32")


def examine(subject: Subject, **settings: float) -> Experiment:
    return experiment(subject, PROMPTS, ExperimentSettings(new_tokens=NEW_TOKENS, **settings))


def test_nothing_is_recommended_for_a_healthy_pair(healthy: Subject) -> None:
    found = examine(healthy)
    assert (found.verdict, found.causes) == ("nothing_wrong", ())
    assert found.length > 3
    assert found.reads_context


@pytest.mark.parametrize("fault", FAULTS)
def test_the_planted_fault_is_named_first(
    fault: str, pair: tuple[Path, Path], healthy: Subject, tmp_path: Path
) -> None:
    target, draft = pair
    broken = copy(draft, tmp_path / "broken")
    FAULTS[fault](broken, healthy.wiring)
    found = examine(open_subject(target, broken, "float32"))
    assert found.verdict == "cause_found"
    assert found.causes[0].candidate.change == fault
    assert found.causes[0].length > found.length


def test_a_gain_within_the_margin_is_no_recommendation(
    pair: tuple[Path, Path], healthy: Subject, tmp_path: Path
) -> None:
    target, draft = pair
    broken = copy(draft, tmp_path / "broken")
    FAULTS["yarn_scale"](broken, healthy.wiring)
    subject = open_subject(target, broken, "float32")
    gain = examine(subject).judged[0].gain
    assert gain > 0
    assert examine(subject, margin=gain).causes == ()


def test_a_draft_of_noise_is_unexplained_not_healthy(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"target_layer_ids": [1, 3, 5], "num_target_layers": 3, "target_num_hidden_layers": 7}
    noise = write_draft(tmp_path / "noise", **config, max_position_embeddings=256)
    found = examine(open_subject(pair[0], noise, "float32"))
    assert found.verdict == "unexplained"


def test_a_dtype_that_is_lower_is_tried_higher(pair: tuple[Path, Path]) -> None:
    subject = open_subject(*pair, "bfloat16")
    found = examine(subject)
    assert "dtype" in {change for change, _, _ in found.screened}
    assert "dtype" not in found.not_tried


def test_the_engine_records_what_the_batch_records(healthy: Subject) -> None:
    assert isinstance(healthy.recorder, BatchRecorder)
    weights = healthy.recorder.weights
    through_engine = EngineRecorder(lambda layers, _: LlamaTarget(weights, layers), healthy.recorder.layers)
    prompts = [healthy.prompt_ids(prompt) for prompt in PROMPTS[:3]]
    ours, theirs = (r.record(prompts, 12, healthy.stop_ids, [1, 4]) for r in (healthy.recorder, through_engine))
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.answer_start == other.answer_start
        for tap, rows in one.taps.items():
            assert rows.shape == other.taps[tap].shape
            assert rows.allclose(other.taps[tap], atol=1e-4)


def test_too_few_prompts_are_refused(healthy: Subject) -> None:
    with pytest.raises(BadInput, match="4 prompts"):
        experiment(healthy, PROMPTS[:4])
