"""bf16 compute: the network's products lose bits, masters and loss do not, and training goes the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from k3dspark.cli.main import app
from k3dspark.model import packed
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.loss import LossTerms, LossWeights, block_loss
from k3dspark.training.shards import ShardStore
from k3dspark.training.trainer import Trainer, TrainSettings
from small_training import small_draft


def gradients(
    store: ShardStore, weights: LlamaWeights, kind: str, compute: torch.dtype
) -> tuple[LossTerms, dict[str, Tensor]]:
    batch = store.batch(store.train[:4], 6, 7, torch.Generator().manual_seed(0))
    model = small_draft(weights, batch.taps.flatten(0, 1), markov_head_type=kind)
    model.markov_head.markov_w2.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    terms = block_loss(model, batch, LossWeights(), compute)
    terms.total.backward()  # type: ignore[no-untyped-call]
    return terms, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_loss_and_gradients_are_near_those_of_float32(store: ShardStore, weights: LlamaWeights, kind: str) -> None:
    exact, wanted = gradients(store, weights, kind, torch.float32)
    rough, found = gradients(store, weights, kind, torch.bfloat16)
    assert float(rough.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.01)
    assert float(rough.total.detach()) != float(exact.total.detach())  # it did run in bf16
    assert wanted.keys() == found.keys()
    ours, theirs = (torch.cat([g[name].flatten() for name in wanted]) for g in (found, wanted))
    assert float(F.cosine_similarity(ours, theirs, dim=0)) > 0.99


def test_masters_and_optimiser_stay_in_float32_and_training_ends_near(
    store: ShardStore, weights: LlamaWeights, tmp_path: Path
) -> None:
    settings = TrainSettings(steps=60, sequences=4, anchors=8, optimiser="adamw", evaluate_every=1000)
    ends = []
    for compute in ("float32", "bf16"):
        model = small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())
        losses: list[dict[str, Any]] = []
        trainer = Trainer(model, store, replace(settings, compute=compute), tmp_path / compute)  # type: ignore[arg-type]
        trainer.run(losses.append, evaluate=False)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        state = trainer.optimisers[0].state_dict()["state"]
        assert all(s["exp_avg"].dtype == torch.float32 for s in state.values())
        ends.append((losses[0]["loss"], losses[-1]["loss"]))
    (start, exact), (_, rough) = ends
    assert exact < start
    assert rough == pytest.approx(exact, rel=0.02)


def test_a_cpu_without_bf16_units_is_told_that_it_will_be_slower(
    deep_target: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "native_bf16", lambda: False)
    done = CliRunner().invoke(
        app,
        ["train", "--target", str(deep_target), "--out", str(tmp_path), "--data", str(shards), "--answer-tokens", "0",
         "--steps", "1", "--sequences", "2", "--anchors", "2", "--layers", "1", "--draft-vocab", "260",
         "--compute", "bf16"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "slower here than float32" in done.stderr
