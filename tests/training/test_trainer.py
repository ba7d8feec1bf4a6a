"""The loop learns, stops, and goes on exactly where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.evaluate import replay_greedy
from k3dspark.training.loss import LossWeights
from k3dspark.training.muon import orthogonalise
from k3dspark.training.pipeline import TrainJob, default_taps, train
from k3dspark.training.shards import ShardStore
from k3dspark.training.trainer import ShortBlocks, Trainer, TrainSettings
from small_training import SHAPE, regenerator, small_draft

FAST = TrainSettings(steps=12, sequences=2, anchors=4, evaluate_every=1000, checkpoint_every=1000)


def quiet(_: dict[str, Any]) -> None:
    pass


def fresh(store: ShardStore, weights: LlamaWeights) -> K3DSparkModel:
    return small_draft(weights, torch.cat([store.rows("taps", s) for s in store.train[:4]]).float())


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_an_interrupted_run_ends_with_the_same_weights(
    store: ShardStore, weights: LlamaWeights, tmp_path: Path, optimiser: str
) -> None:
    settings = replace(FAST, optimiser=optimiser, short=ShortBlocks(steps=5, block_size=3))
    whole = Trainer(fresh(store, weights), store, settings, tmp_path / "whole")
    whole.run(quiet, evaluate=False)

    class StopError(Exception):
        pass

    first = Trainer(fresh(store, weights), store, settings, tmp_path / "parts")
    original = first._one_step

    def seven(batch: Any) -> dict[str, Any]:
        if first.step == 7:
            raise StopError
        return original(batch)

    first._one_step = seven  # type: ignore[method-assign]
    with pytest.raises(StopError):
        first.run(quiet, evaluate=False)
    first.save()
    second = Trainer(fresh(store, weights), store, settings, tmp_path / "parts")
    assert second.resume()
    assert second.step == 7
    second.run(quiet, evaluate=False)
    ours, theirs = whole.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_draft_learns_a_few_answers_by_heart(store: ShardStore, weights: LlamaWeights, tmp_path: Path) -> None:
    """Overfit: acceptance on the very answers it trained on rises far above the untrained draft's."""
    store.train = [s for s in store.train if s.greedy and s.end - s.answer_start > 18][:3]
    assert len(store.train) == 3
    settings = TrainSettings(
        steps=350, sequences=3, anchors=16, learning_rate=3e-3, optimiser="adamw", loss=LossWeights(1.0, 0.0, 0.1),
        evaluate_every=1000, checkpoint_every=1000,
    )  # fmt: skip
    model = fresh(store, weights)
    before = replay_greedy(model, store, store.train).acceptance_length
    Trainer(model, store, settings, tmp_path).run(quiet, evaluate=False)
    after = replay_greedy(model, store, store.train).acceptance_length
    assert before < 2
    assert after > 5


def test_the_whole_job_leaves_a_draft_that_loads(
    deep_target: Path, shards: Path, weights: LlamaWeights, tmp_path: Path
) -> None:
    settings = replace(FAST, steps=4)
    job = TrainJob(deep_target, tmp_path / "out", shards, answer_tokens=0, shape=SHAPE, settings=settings)
    record = train(job, lambda *_: None)
    assert record["steps"] == 4
    assert json.loads((tmp_path / "out" / "training.json").read_text())["answer_tokens"] > 0
    draft = load_draft(tmp_path / "out", target_embed=weights.embed, target_lm_head=weights.head)
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert draft.config.target_layer_ids == default_taps(7)


def test_exported_context_projection_reads_unscaled_taps(
    deep_target: Path, shards: Path, weights: LlamaWeights, tmp_path: Path
) -> None:
    """Training sees taps divided by their rms; the exported draft must see them as the target gives them."""
    from k3dspark.training.pipeline import new_draft
    from k3dspark.training.teacher import Teacher

    job = TrainJob(deep_target, tmp_path / "out", shards, answer_tokens=0, shape=SHAPE, settings=replace(FAST, steps=1))
    train(job, lambda *_: None)
    store = ShardStore(shards)
    model = new_draft(job, Teacher.at(deep_target), store)
    Trainer(model, store, job.settings, job.out).resume()
    draft = load_draft(job.out, target_embed=weights.embed, target_lm_head=weights.head, dtype=torch.float32)
    sequence = store.train[0]
    assert store.tap_scale is not None
    assert float((store.tap_scale - 1).abs().max()) > 0.1
    with torch.no_grad():
        ours = model.context_features(store.taps(sequence))
        theirs = draft.context_features(store.rows("taps", sequence).float())
    torch.testing.assert_close(theirs, ours, atol=0.05, rtol=0.05)  # bf16 weights


def test_a_second_run_of_a_finished_job_changes_nothing(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    job = TrainJob(deep_target, tmp_path / "out", shards, answer_tokens=0, shape=SHAPE, settings=replace(FAST, steps=2))
    train(job, lambda *_: None)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    train(job, lambda *_: None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_training_without_data_says_so(deep_target: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    job = TrainJob(deep_target, tmp_path / "out", tmp_path / "data", answer_tokens=0, shape=SHAPE, settings=FAST)
    with pytest.raises(BadInput, match="no training shards"):
        train(job, lambda *_: None)


def test_a_damaged_shard_is_named(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "s0-00000.safetensors").write_bytes(next(shards.glob("*.safetensors")).read_bytes()[:1000])
    with pytest.raises(BadInput, match="s0-00000"):
        ShardStore(tmp_path)


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    matrix = torch.randn(24, 10, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix, 5))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_prompts_that_overlap_the_held_out_ones_are_never_used(weights: LlamaWeights) -> None:
    source = regenerator(weights, seed=3)
    prompts = source._prompts()
    assert prompts
    again = regenerator(weights, seed=3, held_out=prompts[:2])._prompts()
    assert not set(prompts[:2]) & set(again)


def test_a_checkpoint_of_another_draft_is_refused(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    settings = replace(FAST, steps=1)
    job = TrainJob(deep_target, tmp_path, shards, answer_tokens=0, shape=SHAPE, settings=settings)
    train(job, lambda *_: None)
    with pytest.raises(BadInput, match="checkpoint of another draft"):
        train(replace(job, shape=replace(SHAPE, layers=1)), lambda *_: None)


def test_a_damaged_checkpoint_is_named(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"not a checkpoint")
    job = TrainJob(deep_target, tmp_path, shards, answer_tokens=0, shape=SHAPE, settings=FAST)
    with pytest.raises(BadInput, match=r"state\.safetensors cannot be read"):
        train(job, lambda *_: None)


def test_an_output_that_cannot_be_written_is_refused(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = TrainJob(deep_target, tmp_path / "file" / "out", shards, answer_tokens=0, shape=SHAPE, settings=FAST)
    with pytest.raises(BadInput, match="cannot write"):
        train(job, lambda *_: None)


def test_a_run_begins_from_another_drafts_weights_and_records_where(
    deep_target: Path, shards: Path, tmp_path: Path
) -> None:
    settings = replace(FAST, steps=3)
    job = TrainJob(deep_target, tmp_path / "first", shards, answer_tokens=0, shape=SHAPE, settings=settings)
    first = train(job, lambda *_: None)
    frozen = replace(FAST, steps=1, learning_rate=0.0)
    record = train(replace(job, out=tmp_path / "second", start=tmp_path / "first", settings=frozen), lambda *_: None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():  # a learning rate of zero: only the fold of the tap scale may round, once
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=2**-8)
    assert record["started_from"]["steps"] == first["steps"] == 3


def test_a_start_of_another_shape_is_refused(deep_target: Path, shards: Path, tmp_path: Path) -> None:
    settings = replace(FAST, steps=1)
    job = TrainJob(deep_target, tmp_path / "first", shards, answer_tokens=0, shape=SHAPE, settings=settings)
    train(job, lambda *_: None)
    wider = replace(SHAPE, kv_lora_rank=24)
    with pytest.raises(BadInput, match="another shape"):
        train(replace(job, out=tmp_path / "second", start=tmp_path / "first", shape=wider), lambda *_: None)
