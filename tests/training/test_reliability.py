"""Figures of reliability against their definitions, written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.training.reliability import auroc, brier, ece, reliability, reliability_curve

predictions = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def test_ece_weighs_each_bin_by_its_predictions() -> None:
    # two bins: three predictions of mean 0.2 with a third true, one of 0.9 that is false
    assert ece([0.1, 0.2, 0.3, 0.9], [0, 1, 0, 0], 2) == pytest.approx(0.75 * abs(0.2 - 1 / 3) + 0.25 * 0.9)


def test_perfectly_calibrated_predictions_have_no_error() -> None:
    predicted = np.repeat([0.25, 0.75], 400)
    outcome = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 != 0])
    assert ece(predicted, outcome, 10) == pytest.approx(0)
    assert brier(predicted, outcome) == pytest.approx(0.25 * 0.75)


@given(predictions)
def test_auroc_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[float, bool]]) -> None:
    true = [p for p, y in pairs if y]
    false = [p for p, y in pairs if not y]
    found = auroc([p for p, _ in pairs], [y for _, y in pairs])
    if not true or not false:
        assert found is None
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in true for b in false)
    assert found == pytest.approx(wins / (len(true) * len(false)))


@given(predictions, st.integers(1, 30))
def test_the_curve_holds_every_prediction_once(pairs: list[tuple[float, bool]], bins: int) -> None:
    curve = reliability_curve([p for p, _ in pairs], [y for _, y in pairs], bins)
    assert sum(b.count for b in curve) == len(pairs)
    assert sum(b.count * b.observed for b in curve) == pytest.approx(sum(y for _, y in pairs))
    assert all(b.low - 1e-9 <= b.predicted <= b.high + 1e-9 for b in curve)


def test_tensors_and_arrays_give_the_same_figures() -> None:
    predicted, outcome = torch.rand(200, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3 == 0
    assert reliability(predicted, outcome) == reliability(predicted.numpy(), outcome.numpy())


def test_no_predictions_have_no_figures() -> None:
    assert reliability([], []) is None


@pytest.mark.parametrize(("p", "y"), [([1.5], [1]), ([float("nan")], [1]), ([0.5], [0.5]), ([0.5, 0.5], [1])])
def test_what_is_not_a_probability_or_an_outcome_is_refused(p: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match=r"predictions|outcomes"):
        reliability(p, y)
