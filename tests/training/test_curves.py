"""The page of a run is drawn from metrics.jsonl, whatever a kill has left in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3dspark.target.weights import LlamaWeights
from k3dspark.training.curves import read_metrics, series, write_curves
from k3dspark.training.shards import ShardStore
from k3dspark.training.trainer import Trainer, TrainSettings
from small_training import small_draft


def written(out: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (out / "metrics.jsonl").write_text(text)
    return out


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    out = written(
        tmp_path, {"step": 10, "loss": 2.0}, '{"step": 20, "lo{"step": 20, "loss": 1.5}', {"step": 30, "loss": 1.0}
    )
    assert series(read_metrics(out), "loss") == ([10, 30], [2.0, 1.0])


def test_a_step_run_twice_counts_as_it_was_run_last(tmp_path: Path) -> None:
    lines = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 9.0}, {"step": 20, "loss": 1.0}, {"step": 30, "loss": 0.5}]
    assert series(read_metrics(written(tmp_path, *lines)), "loss") == ([10, 20, 30], [2.0, 1.0, 0.5])


def test_a_run_draws_its_page_at_each_evaluation_and_at_the_end(
    store: ShardStore, weights: LlamaWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(out: Path) -> Path:
        drawn.append(len(read_metrics(out)))
        return write_curves(out)

    monkeypatch.setattr("k3dspark.training.trainer.write_curves", draw)
    settings = TrainSettings(steps=20, sequences=2, anchors=4, evaluate_every=10, checkpoint_every=1000)
    model = small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())
    Trainer(model, store, settings, tmp_path).run(lambda _: None)
    assert drawn == [2, 4, 5]  # a line of training and one of evaluation each time, and the last evaluation
    html = (tmp_path / "training.html").read_text(encoding="utf-8")
    for curve in ("acceptance length", "cross-entropy", "learning rate", "slots a second", "slot 7"):
        assert curve in html
    assert html.count("Plotly.newPlot(") >= 6


def test_a_page_that_cannot_be_written_does_not_end_the_run(
    store: ShardStore, weights: LlamaWeights, tmp_path: Path
) -> None:
    (tmp_path / "training.html").mkdir()
    settings = replace(TrainSettings(), steps=1, sequences=2, anchors=4)
    model = small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())
    trainer = Trainer(model, store, settings, tmp_path)
    with pytest.warns(UserWarning, match=r"cannot write .*training\.html"):
        trainer.run(lambda _: None, evaluate=False)
    assert trainer.step == 1


def test_nothing_recorded_is_a_page_that_says_so(tmp_path: Path) -> None:
    assert "Nothing has been recorded yet" in write_curves(tmp_path).read_text(encoding="utf-8")
