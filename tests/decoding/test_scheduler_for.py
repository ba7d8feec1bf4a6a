"""Schedulers by name: what each asks of the draft, and costs measured on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3dspark.decoding import CostAware, Engine, FixedLength, FullBlock, SamplingParams, StepCosts, Threshold
from k3dspark.decoding.calibration import Calibration, OnlineCalibration, Scaling
from k3dspark.decoding.costs import measure
from k3dspark.decoding.scheduler_for import Schedule, scheduler_for
from k3dspark.errors import BadInput
from k3dspark.model import native
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.loading import open_target
from tiny_models import write_target
from toy_models import ToyTarget, toy_draft

TARGET = ToyTarget()
DRAFT = toy_draft(TARGET)
COSTS = StepCosts.synthetic(1.0, 0.1, 1)


def test_each_name_gives_its_scheduler() -> None:
    kinds = {
        "full": (Schedule(), FullBlock),
        "fixed": (Schedule("fixed", 3), FixedLength),
        "threshold": (Schedule("threshold"), Threshold),
        "cost": (Schedule("cost"), CostAware),
    }
    for schedule, kind in kinds.values():
        assert type(scheduler_for(schedule, TARGET, DRAFT, costs=COSTS)) is kind


@pytest.mark.parametrize("kind", ["threshold", "cost"])
def test_confidence_is_not_read_from_a_draft_that_has_none(kind: Any) -> None:
    headless = toy_draft(TARGET, enable_confidence_head=False)
    with pytest.raises(BadInput, match="enable_confidence_head"):
        scheduler_for(Schedule(kind), TARGET, headless, costs=COSTS)
    assert type(scheduler_for(Schedule(), TARGET, headless)) is FullBlock


@pytest.mark.parametrize("length", [0, 8])
def test_a_length_that_the_block_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(BadInput, match="proposes 7 tokens"):
        scheduler_for(Schedule("fixed", length), TARGET, DRAFT)


@pytest.mark.parametrize("arguments", [("full", 3), ("cost", 3), ("fixed",), ("full", None, 0.1, True)])
def test_combinations_that_mean_nothing_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(BadInput):
        Schedule(*arguments)


def test_the_calibration_reaches_the_scheduler_and_online_starts_from_it() -> None:
    calibration = Calibration({"greedy": Scaling((2.0,), (0.0,))})
    fixed = scheduler_for(Schedule("threshold"), TARGET, DRAFT, calibration=calibration)
    online = scheduler_for(Schedule("threshold", online=True), TARGET, DRAFT, calibration=calibration)
    assert isinstance(fixed, Threshold)
    assert isinstance(online, Threshold)
    assert fixed.calibration is calibration
    assert isinstance(online.calibration, OnlineCalibration)
    assert online.calibration.scaling("greedy") == calibration.scaling("greedy")


def test_exact_decoding_plans_each_request_alone_and_learns_from_no_other() -> None:
    scheduler = scheduler_for(Schedule("cost"), TARGET, DRAFT, costs=COSTS, exact=True)
    assert isinstance(scheduler, CostAware)
    assert scheduler.alone
    with pytest.raises(BadInput, match="online calibration with exact decoding"):
        scheduler_for(Schedule("cost", online=True), TARGET, DRAFT, costs=COSTS, exact=True)


def test_a_schedule_that_learns_online_learns_from_the_engines_rounds_and_changes_no_token() -> None:
    scheduler = scheduler_for(Schedule("threshold", least=0.0, online=True), TARGET, DRAFT)
    engine = Engine(TARGET, DRAFT, scheduler)
    for prompt in ([1, 2], [3], [4, 5]):
        assert list(engine.generate(prompt, SamplingParams(60)).token_ids) == TARGET.greedy(prompt, 60)
    assert isinstance(scheduler, Threshold)
    assert isinstance(scheduler.calibration, OnlineCalibration)
    shifts = scheduler.calibration.scaling("greedy").shifts
    assert shifts
    assert shifts[0] < 0, "this random draft is accepted less often than a confidence of one half says"


def test_sizes_within_a_tile_of_an_exact_target_cost_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)  # our kernels need no tiles
    target = open_target(write_target(tmp_path / "target"), dtype="float32", tap_layer_ids=(0, 2))
    assert isinstance(target, LlamaTarget)
    sizes, seconds = zip(*measure(target, None, requests=target.tile_rows, repeats=2, context=20).verify, strict=True)
    assert sizes == (1, target.tile_rows)
    assert seconds[0] == seconds[1]


def test_measured_costs_cover_every_length_and_never_fall_with_rows() -> None:
    costs = measure(TARGET, DRAFT, repeats=2, context=20)
    sizes, seconds = zip(*costs.verify, strict=True)
    assert sizes == tuple(range(1, 9))
    assert list(seconds) == sorted(seconds)
    assert seconds[0] > 0
    assert TARGET.open_sequences == 0
    assert StepCosts.from_json(costs.as_json()) == costs


@pytest.mark.parametrize("value", [{}, {"draft": 3, "verify": []}, {"draft": [[1, 1.0]], "verify": [[1]]}])
def test_what_is_no_table_of_costs_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        StepCosts.from_json(value)
