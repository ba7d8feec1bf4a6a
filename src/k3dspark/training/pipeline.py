"""From a target to a draft: regenerate answers, train, export; each stage resumes where it stopped."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from k3dspark.checkpoint.inventory import expected_tensors
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft, save_draft
from k3dspark.target.kimi_k3_model import TapStream
from k3dspark.target.loading import load_tokenizer
from k3dspark.training.curves import read_metrics
from k3dspark.training.disk import ShardRoom, remove_stale
from k3dspark.training.initialise import draft_vocabulary, initialise, tap_scale
from k3dspark.training.processes import run_stage
from k3dspark.training.regenerate import RegenerateSettings, Regenerator
from k3dspark.training.shards import ShardStore
from k3dspark.training.teacher import Donor, TargetShape, Teacher
from k3dspark.training.trainer import Trainer, TrainSettings, settings_record

Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a new draft; what is not here follows from the target."""

    layers: int = 3
    block_size: int = 7
    q_lora_rank: int = 256
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    draft_vocab_size: int = 8192


@dataclass(frozen=True)
class TrainJob:
    """One training run. `answer_tokens` more answers are regenerated until that many exist; 0 trains on what is there.

    `data_limit_bytes` is the most that all shards may take: when it is reached, training goes on with what is there.
    `stream` is what the draft taps of a Kimi K3. `minutes` bounds the training stage; a bounded run resumes with the
    same command. With `start`, a new run begins from that draft's weights and vocabulary instead of fresh ones.
    """

    target: Path
    out: Path
    data: Path
    prompts: Path | None = None
    held_out: Path | None = None
    start: Path | None = None
    stream: TapStream = "prefix"
    answer_tokens: int = 200_000
    data_limit_bytes: int | None = None
    processes: int = 1
    minutes: float = math.inf
    shape: DraftShape = field(default_factory=DraftShape)
    regenerate: RegenerateSettings = field(default_factory=RegenerateSettings)
    settings: TrainSettings = field(default_factory=TrainSettings)


def train(job: TrainJob, report: Report) -> dict[str, Any]:
    """Run the stages; returns the record that is also written beside the draft in `job.out`."""
    teacher = Teacher.at(job.target, job.stream)
    for directory in (job.out, job.data):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot write to {directory}", str(error), "choose another directory") from error
    _require_stream(job)
    rendezvous = job.out / "rendezvous"
    if job.answer_tokens:
        remove_stale(job.data)
        run_stage(_regenerate_worker, job.processes, rendezvous, job, report)
        _check_room(job, report)
    run_stage(_train_worker, job.processes, rendezvous, job, report)
    return export(job, teacher)


def draft_config(
    shape: TargetShape, draft: DraftShape, stop_ids: tuple[int, ...], stream: TapStream = "prefix"
) -> K3DSparkConfig:
    """The config of a new draft: the target's widths and vocabulary, K3's switches, YaRN over the target's window."""
    other_stream = {} if stream == "prefix" else {"aux_hidden_stream": stream}  # the published file has no such key
    factor = 4.0 if shape.max_positions % 4 == 0 and shape.max_positions >= 4096 else 1.0
    theta = 50000.0
    return K3DSparkConfig(
        architectures=["K3DSparkModel"],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=draft.layers,
        num_attention_heads=max(shape.hidden_size // draft.v_head_dim, 1),
        num_key_value_heads=max(shape.hidden_size // draft.v_head_dim, 1),
        q_lora_rank=draft.q_lora_rank,
        kv_lora_rank=draft.kv_lora_rank,
        qk_nope_head_dim=draft.qk_nope_head_dim,
        qk_rope_head_dim=draft.qk_rope_head_dim,
        v_head_dim=draft.v_head_dim,
        mla_use_nope=False,
        mla_use_output_gate=False,
        vocab_size=shape.vocab_size,
        draft_vocab_size=min(draft.draft_vocab_size, shape.vocab_size),
        rms_norm_eps=1e-5,
        max_position_embeddings=shape.max_positions,
        rope_theta=theta,
        rope_parameters={
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(shape.max_positions / factor),
            "rope_theta": theta,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        num_target_layers=5,
        target_hidden_size=shape.hidden_size,
        target_num_hidden_layers=shape.layers,
        target_layer_ids=default_taps(shape.layers),
        mask_token_id=min(16, shape.vocab_size - 1),
        bos_token_id=None,
        eos_token_id=stop_ids[0] if stop_ids else None,
        pad_token_id=None,
        markov_rank=draft.markov_rank,
        markov_head_type=draft.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        tie_word_embeddings=False,
        share_target_embeddings=True,
        block_size=draft.block_size,
        block_causal=False,
        torch_dtype="bfloat16",
        **other_stream,
    )


def default_taps(layers: int) -> list[int]:
    """Five layers spread as K3's [2, 23, 47, 71, 89] are over 93; never the last, whose output is ambiguous."""
    if layers < 6:
        raise BadInput(
            f"the target has {layers} layers", "five taps below the last layer are needed", "use a deeper target"
        )
    spread = [max(1, round(i * layers / 93)) for i in (2, 23, 47, 71, 89)]
    spread[-1] = min(spread[-1], layers - 2)
    taps: list[int] = []
    for tap in spread:
        taps.append(max(tap, taps[-1] + 1) if taps else tap)
    overshoot = max(taps[-1] - (layers - 2), 0)
    return [tap - overshoot for tap in taps] if taps[0] - overshoot >= 0 else list(range(layers - 6, layers - 1))


# -- stages ----------------------------------------------------------------------------------------------------------


def _regenerate_worker(rank: int, job: TrainJob, report: Report) -> None:
    target_tokens = job.answer_tokens // job.processes
    have = _answer_tokens(job.data) // job.processes
    if have >= target_tokens:
        return
    teacher = Teacher.at(job.target, job.stream)
    seed = job.regenerate.seed * 1000 + len(list(job.data.glob("*.safetensors"))) * job.processes + rank
    settings = RegenerateSettings(**{**asdict(job.regenerate), "seed": seed})
    worker = Regenerator(
        teacher.forward(default_taps(teacher.shape.layers)),
        load_tokenizer(job.target),
        teacher.stop_ids,
        settings,
        read_prompts(job.held_out) if job.held_out else [],
        read_prompts(job.prompts)[rank :: job.processes] if job.prompts else None,
    )
    report_rank = report if rank == 0 else lambda *_: None
    room = ShardRoom(job.data_limit_bytes)
    worker.write_shards(job.data, target_tokens - have, f"s{seed}", lambda m: report_rank("regenerate", m), room)


def _require_stream(job: TrainJob) -> None:
    """Raises `BadInput` when the shards hold the other stream's taps; a mark beside them says which."""
    mark = job.data / "stream"
    if list(job.data.glob("*.safetensors")):
        held = mark.read_text(encoding="utf-8").strip() if mark.is_file() else "prefix"
        if held != job.stream:
            raise BadInput(
                f"{job.data} holds taps of the stream {held}",
                f"this draft is to read {job.stream}",
                "give another --data, or the --stream these answers were made with",
            )
    elif job.stream != "prefix":
        mark.write_text(job.stream + "\n", encoding="utf-8")
    else:
        mark.unlink(missing_ok=True)


def _check_room(job: TrainJob, report: Report) -> None:
    """Say so when the data limit has ended regeneration. Raises `BadInput` when it leaves nothing to train on."""
    if job.data_limit_bytes is None:
        return
    limit, have = f"{job.data_limit_bytes / 1e9:g} GB", _answer_tokens(job.data)
    if not have:
        raise BadInput(
            f"the data limit of {limit} holds no shard", "one shard of answers takes more", "give a larger --data-limit"
        )
    # Given prompts may have ended first; the target's own never do.
    if have < job.answer_tokens and (job.prompts is None or ShardRoom(job.data_limit_bytes).used_up(job.data)):
        report("data limit", {"answer_tokens": have, "wanted_tokens": job.answer_tokens, "limit": limit})


def _train_worker(rank: int, job: TrainJob, report: Report) -> None:
    store = ShardStore(job.data)
    model = new_draft(job, Teacher.at(job.target, job.stream), store)
    trainer = Trainer(model, store, job.settings, job.out)
    trainer.resume()
    trainer.run(lambda m: report("train", m) if rank == 0 else None, time.time() + 60 * job.minutes)


def new_draft(job: TrainJob, teacher: Teacher, store: ShardStore) -> K3DSparkModel:
    """The untrained draft of a job; sets the store's tap scale. Its vocabulary is chosen once and kept in `job.out`."""
    config = draft_config(teacher.shape, job.shape, teacher.stop_ids, teacher.stream)
    donor = teacher.donor()
    if job.start is not None:
        return _started_draft(job, config, donor, store)
    vocabulary = None
    if config.draft_vocab_size < config.vocab_size:
        kept = job.out / "vocabulary.json"
        if kept.is_file():
            vocabulary = torch.tensor(json.loads(kept.read_text()), dtype=torch.int64)
        else:
            counts = store.token_counts(config.vocab_size)
            vocabulary = draft_vocabulary(counts, config.draft_vocab_size, list(teacher.stop_ids))
            temporary = job.out / f"vocabulary.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(vocabulary.tolist()))
            os.replace(temporary, kept)
    sample = _tap_sample(job, store)
    store.tap_scale = tap_scale(sample)
    sample = sample * store.tap_scale
    return initialise(config, donor, vocabulary, sample, job.settings.seed)


def _started_draft(job: TrainJob, config: K3DSparkConfig, donor: Donor, store: ShardStore) -> K3DSparkModel:
    """The draft of `job.start` in fp32, its context_proj freed of the tap scale that `export` folds into it."""
    assert job.start is not None
    model = load_draft(job.start, target_embed=donor.embed, target_lm_head=donor.head, dtype=torch.float32)
    ours, theirs = (expected_tensors(c.mapping()) for c in (config, model.config))
    different = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if different:
        raise BadInput(
            f"{job.start} is a draft of another shape",
            f"{different[0]} differs from what the options of this run ask for",
            "give the options it was made with (its training.json has them)",
        )
    model.embed_tokens.weight.requires_grad_(False)
    store.tap_scale = tap_scale(_tap_sample(job, store))
    with torch.no_grad():
        model.context_proj.weight.div_(store.tap_scale)
    return model.train()


def _tap_sample(job: TrainJob, store: ShardStore) -> torch.Tensor:
    """Rows of the first conversations, kept in `job.out`: scale and starting values must not move with the data."""
    kept = job.out / "tap_sample.safetensors"
    if not kept.is_file():
        sample = torch.cat([store.rows("taps", s)[:-1] for s in store.train[:100]])
        temporary = job.out / f"tap_sample.{os.getpid()}.tmp"
        save_file({"taps": sample}, temporary)
        os.replace(temporary, kept)
    return load_file(kept)["taps"].float()


def export(job: TrainJob, teacher: Teacher) -> dict[str, Any]:
    """Write config.json, model.safetensors (bf16, sharing the target's embedding and head) and training.json."""
    store = ShardStore(job.data)
    model = new_draft(job, teacher, store)
    trainer = Trainer(model, store, job.settings, job.out)
    if not trainer.resume():
        raise BadInput(f"no checkpoint in {job.out}", "training has not saved one yet", "train at least one step")
    if store.tap_scale is not None:
        with torch.no_grad():
            model.context_proj.weight.mul_(store.tap_scale)
    save_draft(model.to(torch.bfloat16), job.out, share_target_embeddings=True)
    record = {
        "steps": trainer.step,
        "settings": settings_record(job.settings),
        "shape": asdict(job.shape),
        "regenerate": asdict(job.regenerate),
        "answer_tokens": store.answer_tokens,
        "conversations": len(store.train) + len(store.evaluation),
        "held_out_conversations": len(store.evaluation),
        "last_metrics": _last_metrics(job.out),
        "started_from": _record_of(job.start) if job.start is not None else None,
    }
    temporary = job.out / "training.json.tmp"
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, job.out / "training.json")
    return record


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: JSON lines with a "prompt", or one prompt a line. Raises `BadInput` when unreadable."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"cannot read prompts from {path}", str(error), "pass a UTF-8 text or JSON-lines file"
        ) from error
    if path.suffix != ".jsonl":
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is not a prompt file", f"a line has no JSON object with a prompt ({error!r})", "see docs/train.md"
        ) from error


def _answer_tokens(data: Path) -> int:
    return ShardStore(data).answer_tokens if list(data.glob("*.safetensors")) else 0


def _record_of(draft: Path) -> dict[str, Any] | None:
    """What a draft's training.json says, so that the record of its successor tells the whole story."""
    path = draft / "training.json"
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}", str(error), "remove it, or fetch the draft again") from error
    return record


def _last_metrics(out: Path) -> dict[str, Any]:
    """The last line of each kind of metrics.jsonl, merged."""
    merged: dict[str, Any] = {}
    for line in read_metrics(out):
        merged |= line
    return merged
