"""Calibration: which rounds are recorded, what is fitted, how it is judged, and what is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.calibration import CALIBRATION_FILE, UNCHANGED, Scaling, Setting, read_calibration
from k3dspark.embedded.pair import ModelPair, load_pair
from k3dspark.errors import BadInput
from k3dspark.training.calibrate import Rounds, calibrate, fit, judge, record, save, split
from k3dspark.training.own_prompts import own_prompts
from tiny_models import write_draft, write_pair
from toy_models import ToyTarget, oracle

WEIGHTS, SHIFTS = (0.5, 1.0, 2.0), (-1.0, 0.5, 0.0)


def planted(count: int, seed: int) -> Rounds:
    """Rounds of which σ(weight · g + shift) is the truth."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.5, 1.5, (count, 3))
    chance = 1 / (1 + np.exp(-(logits * WEIGHTS + SHIFTS)))
    accepted = (random.random((count, 3)) < chance).cumprod(1).sum(1)
    return Rounds(logits, accepted, np.arange(count) // 20)


def test_the_fit_finds_the_truth_slot_by_slot() -> None:
    scaling = fit(planted(20_000, 0))
    np.testing.assert_allclose(scaling.temperatures, 1 / np.array(WEIGHTS), rtol=0.25)
    np.testing.assert_allclose(scaling.shifts, SHIFTS, atol=0.25)


def test_calibration_brings_the_error_of_survival_down_to_that_of_chance() -> None:
    scaling = fit(planted(8000, 0))
    for figures in judge(planted(8000, 1), scaling):
        assert figures.survival_before.ece > 0.04
        assert figures.survival_after.ece < 0.03
        assert figures.survival_after.ece < 3 * figures.floor
        assert figures.survival_after.brier < figures.survival_before.brier


def test_calibration_keeps_the_order_within_a_slot() -> None:
    for figures in judge(planted(4000, 1), fit(planted(4000, 0))):
        assert figures.step_before is not None
        assert figures.step_after is not None
        assert figures.step_before.auroc == pytest.approx(figures.step_after.auroc)


def test_where_nothing_happened_the_scaling_stays_near_what_it_was() -> None:
    none = Rounds(np.zeros((0, 2)), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert fit(none) == Scaling((1.0, 1.0), (0.0, 0.0))


def test_every_whole_block_is_recorded_with_the_prompt_it_belongs_to() -> None:
    target = ToyTarget()
    prompts = [[1, 2, 3], [4, 5], [6]]
    draft = oracle(target, prompts[0], 50, lambda position: position % 4 == 0)
    rounds = record(target, draft, prompts, lambda _: SamplingParams(30), batch=2)
    assert set(rounds.prompt.tolist()) == {0, 1, 2}
    assert rounds.logits == pytest.approx(2.2)
    alone = Engine(target, draft).generate(prompts[0], SamplingParams(30)).stats
    whole = rounds.of([0])
    # the last rounds have no room for a whole block
    assert alone.rounds - 3 <= len(whole) < alone.rounds
    assert set(whole.accepted[1:-1].tolist()) == {3}


def test_the_split_goes_by_the_prompts_not_by_their_order() -> None:
    prompts = [f"prompt {i}" for i in range(11)]
    chosen = [{prompts[i] for i in half} for half in split(prompts)]
    turned = prompts[::-1]
    assert [{turned[i] for i in half} for half in split(turned)] == chosen
    assert [len(half) for half in chosen] == [6, 5]
    assert chosen[0] | chosen[1] == set(prompts)


# -- with a real, small pair


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_pair(root)


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> ModelPair:
    return load_pair(*models, dtype="float32")


def test_settings_stand_beside_each_other_and_those_of_other_weights_go(
    pair: ModelPair, models: tuple[Path, Path], tmp_path: Path
) -> None:
    assert pair.draft is not None
    path = tmp_path / CALIBRATION_FILE
    prompts = [f"question {i}?" for i in range(6)]
    for setting in (Setting(), Setting(1.0, top_p=0.9)):
        save(path, pair.draft, calibrate(pair, prompts, setting, max_new_tokens=64))
    found = read_calibration(tmp_path, pair.draft)
    assert found is not None
    assert set(found.settings) == {"greedy", "temperature=1,top_p=0.9"}
    assert found.scaling("greedy") != UNCHANGED

    other = load_pair(models[0], write_draft(tmp_path / "other", seed=5), dtype="float32")
    assert other.draft is not None
    save(path, other.draft, calibrate(other, prompts, Setting(), max_new_tokens=64))
    assert list(json.loads(path.read_text())["settings"]) == ["greedy"]
    assert read_calibration(tmp_path, pair.draft) is None


def test_too_few_rounds_are_refused(pair: ModelPair) -> None:
    with pytest.raises(BadInput, match="rounds to fit on"):
        calibrate(pair, ["one", "two"], Setting(), max_new_tokens=12)


def test_a_draft_without_a_confidence_head_cannot_be_calibrated(models: tuple[Path, Path], tmp_path: Path) -> None:
    headless = load_pair(models[0], write_draft(tmp_path / "headless", enable_confidence_head=False))
    with pytest.raises(BadInput, match="enable_confidence_head"):
        calibrate(headless, ["one", "two"], Setting())


def test_the_pair_writes_its_own_prompts_the_same_for_the_same_seed(pair: ModelPair) -> None:
    prompts = own_prompts(pair, 4, seed=3)
    assert len(set(prompts)) == 4
    assert own_prompts(pair, 4, seed=3) == prompts
    assert own_prompts(pair, 4, seed=4) != prompts
