"""Drafts trained on a Kimi K3 in miniature: on the right taps, on the other stream, on taps one layer late.

All 93 layers, 64 wide, random weights; `calm_target` says what is changed about them and why. One set of answers, three
sets of taps of these answers, the same budget for each draft; then 20 other prompts, decoded plainly and with each.

    python benchmarks/kimi_k3_draft.py --out runs/k3 [--steps 1200]

Stages that are done are not done again. One core of an ordinary machine takes about 40 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.synth import synthesise
from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.stats import DecodeStats
from k3dspark.embedded.pair import load_pair
from k3dspark.target.kimi_k3_batch import KimiK3BatchForward
from k3dspark.target.kimi_k3_model import TapStream
from k3dspark.target.loading import load_tokenizer
from k3dspark.training.pipeline import DraftShape, TrainJob, train
from k3dspark.training.regenerate import RegenerateSettings, Regenerator
from k3dspark.training.shards import ShardStore
from k3dspark.training.teacher import Teacher
from k3dspark.training.trainer import TrainSettings

TAPS = (2, 23, 47, 71, 89)
ALPHABET = range(32, 128)  # the bytes that answers consist of
LOUD, QUIET = 0.06, 0.0004  # of what the first attention and everything after it add
SHARP = 60.0  # of the logits of these bytes
PROMPTS, NEW = 20, 48
WIDTH = 64  # of the target


@dataclass(frozen=True)
class Taps:
    """What a draft is trained on, and what it believes it reads."""

    stream: TapStream
    late: int = 0  # layers


TRAINED = {
    "right": Taps("prefix"),
    "other stream": Taps("attn_res"),
    "one layer late": Taps("prefix", late=1),
}


def calm_target(directory: Path) -> None:
    """The miniature of `synth --mini-k3`, its random weights scaled so that a draft can learn from few answers.

    As it is written, 93 random layers answer chaotically: the next token follows from nothing that thousands of answers
    show. Here the first layer's attention speaks up and remembers little but the last two tokens, the other layers
    whisper, and answers keep to 96 bytes. What comes next then depends on the anchor, which a draft is told, and on
    the token before it, which it can know from its taps alone.
    """
    synthesise(directory, mini_k3="prefix")
    root = "language_model.model.layers."
    outputs = ("self_attn.o_proj", "mlp.down_proj", "shared_experts.down_proj", "routed_expert_up_proj")
    for path in sorted((directory / "target").glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.removesuffix(".weight").endswith(outputs):
                tensor *= LOUD if name == f"{root}0.self_attn.o_proj.weight" else QUIET
            elif name == f"{root}0.self_attn.dt_bias":
                tensor += 6.0  # forgets at once
            elif name.startswith(f"{root}0.self_attn.") and name.endswith("conv1d.weight"):
                tensor[..., :2] = 0
            elif name.endswith("lm_head.weight"):
                tensor[list(ALPHABET)] *= SHARP
        save_file(tensors, path)


def texts(count: int, seed: int) -> list[str]:
    """Different prompts of a few letters."""
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(8, 12))) for _ in range(count)]


def record_answers(target: Path, places: dict[str, Path], prompts: int, tokens: int) -> None:
    """One shard of answers for each of `TRAINED`: the same answers, each with its taps."""
    teacher = Teacher.at(target)
    late = tuple(layer + TRAINED["one layer late"].late for layer in TAPS)
    forward = teacher.forward(TAPS)
    assert isinstance(forward, KimiK3BatchForward)
    forward.tap_layer_ids = tuple(sorted({*TAPS, *late}))
    settings = RegenerateSettings(group=prompts, answers=1, max_answer_tokens=tokens)
    regenerator = Regenerator(
        forward, load_tokenizer(target), teacher.stop_ids, settings, held_out=[], prompts=texts(prompts, seed=1)
    )
    both = places["right"].parent / "both"
    regenerator.write_shards(both, prompts, "answers")
    (path,) = both.glob("*.safetensors")
    shard = load_file(path)
    wide = shard["taps"].unflatten(-1, (-1, WIDTH))
    for name, layers in (("right", TAPS), ("one layer late", late)):
        chosen = [forward.tap_layer_ids.index(layer) for layer in layers]
        _save({**shard, "taps": wide[:, chosen].flatten(1)}, places[name])
    # The other stream of the same tokens: no need to choose them again.
    forward = KimiK3BatchForward(forward.model, TAPS, TRAINED["other stream"].stream)
    offsets = shard["offsets"].tolist()
    spans = list(itertools.pairwise(offsets))
    with torch.no_grad():
        rows = forward.prefill([shard["ids"][first:last].tolist() for first, last in spans], 0, record=True).rows
    _save({**shard, "taps": torch.cat([taps for _, taps in rows])}, places["other stream"])


def _save(shard: dict[str, torch.Tensor], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in shard.items()}, directory / "answers.safetensors")


def job(target: Path, out: Path, data: Path, steps: int) -> TrainJob:
    """The budget that every draft gets."""
    shape = DraftShape(q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    settings = TrainSettings(steps=steps, sequences=8, learning_rate=2e-3, weight_decay=0.05)
    return TrainJob(target, out, data, answer_tokens=0, shape=shape, settings=settings)


def answers(target: Path, draft: Path | None) -> tuple[list[list[int]], DecodeStats]:
    """Greedy answers to prompts that no draft has seen, and pooled counters."""
    pair = load_pair(target, draft, dtype="float32")
    engine = Engine(pair.target, pair.draft)
    requests = [
        engine.submit(pair.chat_ids(text), SamplingParams(NEW, stop_token_ids=pair.stop_ids))
        for text in texts(PROMPTS, seed=2)
    ]
    while not engine.idle:
        engine.step()
    return [request.new_ids for request in requests], engine.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=256, help="answered for training")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--stage", choices=["answers", "train", "all"], default="all")
    options = parser.parse_args()
    out: Path = options.out
    target = out / "pair" / "target"
    places = {name: out / "data" / name.replace(" ", "-") for name in TRAINED}
    if not target.is_dir():
        calm_target(out / "pair")
    if not all((place / "answers.safetensors").is_file() for place in places.values()):
        record_answers(target, places, options.prompts, options.tokens)
    if options.stage == "answers":
        return
    for name, data in places.items():
        draft = out / "drafts" / data.name
        if not (draft / "training.json").is_file():
            started = time.process_time()
            train(job(target, draft, data, options.steps), lambda _, figures: print(figures, file=sys.stderr))
            print(f"{name}: {(time.process_time() - started) / 60:.1f} minutes of a core", file=sys.stderr)
    if options.stage == "train":
        return
    drafts = {"random": out / "pair" / "draft"} | {name: out / "drafts" / data.name for name, data in places.items()}
    drafts["other stream, and told so"] = told(drafts["other stream"], "attn_res")
    record = measured(target, drafts)
    record["answer_tokens"] = ShardStore(places["right"]).answer_tokens
    print(json.dumps(record, indent=1))


def told(draft: Path, stream: TapStream) -> Path:
    """A copy of a draft whose config.json names this stream: the same weights on the taps they were trained on."""
    copy = draft.with_name(f"{draft.name}-told")
    shutil.copytree(draft, copy, dirs_exist_ok=True)
    config = read_config(copy) | {"aux_hidden_stream": stream}
    write_json(copy / "config.json", config)
    return copy


def measured(target: Path, drafts: dict[str, Path]) -> dict[str, Any]:
    """Acceptance length of every draft read as `prefix`, and whether its answers are the plain ones."""
    plain, _ = answers(target, None)
    record: dict[str, Any] = {"different_answers": len({tuple(answer) for answer in plain}), "drafts": {}}
    for name, draft in drafts.items():
        spoken, stats = answers(target, draft)
        record["drafts"][name] = {"identical": spoken == plain, "acceptance_length": stats.acceptance_length}
    return record


if __name__ == "__main__":
    main()
