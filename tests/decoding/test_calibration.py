"""Settings and their keys, the file beside a draft, and calibration that follows past rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.decoding import SamplingParams
from k3dspark.decoding.calibration import (
    CALIBRATION_FILE,
    SCHEMA,
    UNCHANGED,
    Calibration,
    OnlineCalibration,
    Scaling,
    Setting,
    fingerprint,
    read_calibration,
)
from k3dspark.errors import BadInput
from toy_models import ToyTarget, toy_draft

# -- settings


@given(
    temperature=st.floats(0.01, 3).map(lambda t: round(t, 3)),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1).map(lambda p: round(p, 3)),
    min_p=st.floats(0, 0.9).map(lambda p: round(p, 3)),
    verifier=st.sampled_from(["block", "token"]),
)
def test_a_key_names_exactly_one_setting(**values: Any) -> None:
    setting = Setting(**values)
    assert Setting.parse(setting.key) == setting
    assert Setting.of(setting.params()) == setting


def test_whatever_is_off_is_not_in_the_key() -> None:
    assert Setting(1.0).key == "temperature=1"
    assert Setting(0.7, top_p=0.95, verifier="token").key == "temperature=0.7,top_p=0.95,verify=token"


def test_all_greedy_requests_have_one_setting() -> None:
    assert Setting.of(SamplingParams(temperature=0.0, top_p=0.9, verifier="token")).key == "greedy"
    assert Setting.parse("temperature=0") == Setting.parse(" greedy ") == Setting()


@pytest.mark.parametrize(
    "text", ["", "hot", "temperature", "temperature=x", "top_p=0.9", "temperature=1,temperature=2"]
)
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a sampling setting"):
        Setting.parse(text)


@pytest.mark.parametrize(("text", "name"), [("temperature=1,top_p=2", "top_p"), ("verify=fast", "verifier")])
def test_a_setting_with_impossible_values_is_refused(text: str, name: str) -> None:
    with pytest.raises(BadInput, match=name):
        Setting.parse(text)


# -- the file

DRAFT = toy_draft(ToyTarget()).float()


def write(directory: Path, **changes: Any) -> Path:
    entry = {"temperatures": [2.0, 1.0], "shifts": [0.5, 0.0]}
    content = {"schema": SCHEMA, "draft": fingerprint(DRAFT), "settings": {"greedy": entry}} | changes
    (directory / CALIBRATION_FILE).write_text(json.dumps(content))
    return directory


def test_a_setting_in_the_file_is_applied_and_others_are_left_alone(tmp_path: Path) -> None:
    calibration = read_calibration(write(tmp_path), DRAFT)
    assert calibration is not None
    assert (calibration.covers(Setting()), calibration.covers(Setting(1.0))) == (True, False)
    logits = np.array([2.0, -1.0, 3.0])  # the file knows two slots
    np.testing.assert_array_equal(calibration.scaling("greedy")(logits), [1.5, -1.0, 3.0])
    np.testing.assert_array_equal(calibration.scaling("temperature=1")(logits), logits)


def test_without_a_file_there_is_no_calibration(tmp_path: Path) -> None:
    assert read_calibration(tmp_path, DRAFT) is None


def test_a_calibration_of_other_weights_is_not_used(tmp_path: Path) -> None:
    assert read_calibration(write(tmp_path), toy_draft(ToyTarget(), seed=1).float()) is None


def test_the_fingerprint_does_not_depend_on_the_format_the_weights_were_loaded_in() -> None:
    draft = toy_draft(ToyTarget()).bfloat16()
    assert fingerprint(draft) == fingerprint(draft.float())


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "something else"},
        {"settings": []},
        {"settings": {"greedy": 3}},
        {"settings": {"greedy": {"temperatures": [1.0]}}},
        {"settings": {"greedy": {"temperatures": [], "shifts": []}}},
        {"settings": {"greedy": {"temperatures": [0.0], "shifts": [0.0]}}},
        {"settings": {"greedy": {"temperatures": [1.0], "shifts": ["x"]}}},
        {"settings": {"greedy": {"temperatures": [True], "shifts": [0.0]}}},
        {"settings": {"greedy": {"temperatures": [1.0, 1.0], "shifts": [0.0]}}},
        {"settings": {"greedy": {"temperatures": [float("nan")], "shifts": [0.0]}}},
        {"settings": {"greedy": {"temperatures": [1.0], "shifts": [10**400]}}},
        {"settings": [1]},
    ],
)
def test_a_damaged_file_is_named_with_its_remedy(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"calibration\.json") as caught:
        read_calibration(write(tmp_path, **changes), DRAFT)
    assert "k3dspark calibrate" in caught.value.remedy


# -- past rounds


def sampled_round(random: np.random.Generator, weight: float, shift: float) -> tuple[np.ndarray, int]:
    """Logits [1, 3], and how many of the three tokens stood when σ(weight · g + shift) is the truth."""
    logits = random.normal(0.0, 2.0, (1, 3))
    stood = random.random(3) < 1 / (1 + np.exp(-(weight * logits[0] + shift)))
    return logits, int(stood.cumprod().sum())


def test_past_rounds_teach_the_true_scaling() -> None:
    random, online = np.random.default_rng(0), OnlineCalibration()
    for _ in range(6000):
        logits, accepted = sampled_round(random, 0.5, -0.7)
        online.observe(("greedy",), logits, (3,), (accepted,))
    learnt = online.scaling("greedy")
    np.testing.assert_allclose(learnt.temperatures[:2], 2.0, rtol=0.35)
    np.testing.assert_allclose(learnt.shifts[:2], -0.7, atol=0.35)


def test_few_rounds_move_it_little_from_where_it_started() -> None:
    start = Calibration({"greedy": Scaling((2.0,) * 3, (0.5,) * 3)})
    random, online = np.random.default_rng(0), OnlineCalibration(start)
    for _ in range(OnlineCalibration.FIT_EVERY):
        online.observe(("greedy",), random.normal(0.0, 2.0, (1, 3)), (3,), (0,))
    moved = online.scaling("greedy")
    assert moved != start.scaling("greedy")
    assert 0.5 > moved.shifts[0] > -2.5
    assert moved.shifts[1:] == (0.5, 0.5), "slots that were never reached stay"


def test_what_it_learnt_under_one_setting_does_not_touch_another() -> None:
    random, online = np.random.default_rng(0), OnlineCalibration()
    for _ in range(200):
        online.observe(("greedy", "temperature=1"), random.normal(0.0, 1.0, (2, 3)), (3, 0), (1, 0))
    assert online.scaling("greedy") != UNCHANGED
    assert online.scaling("temperature=1") == UNCHANGED


def test_slots_that_were_not_verified_are_no_evidence() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 1.0, (200, 1, 3))
    online, blind = OnlineCalibration(), OnlineCalibration()
    for row in logits:
        online.observe(("greedy",), row, (1,), (1,))
        later = row.copy()
        later[0, 1:] = 7.0  # whatever stands in slots that were not run
        blind.observe(("greedy",), later, (1,), (1,))
    assert online.scaling("greedy") == blind.scaling("greedy")


def test_logits_that_are_not_finite_do_not_spoil_it() -> None:
    online = OnlineCalibration()
    for _ in range(100):
        online.observe(("greedy",), np.array([[np.nan, np.inf, -np.inf]]), (3,), (2,))
    learnt = online.scaling("greedy")
    assert np.isfinite([*learnt.temperatures, *learnt.shifts]).all()
