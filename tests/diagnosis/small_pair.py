"""A tiny target with a draft that has learnt its answers by heart, and the ways in which a user may have it wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from k3dspark.diagnosis.capture import Conversation
from k3dspark.diagnosis.subject import Subject, open_subject
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft, save_draft
from tiny_models import CHAT_TEMPLATE, HIDDEN, VOCABULARY, byte_tokenizer, write_draft

NEW_TOKENS = 24
LAYERS = 7
TAPS = [1, 3, 5]
PROMPTS = tuple(f"{word} {number}" for word in ("sum", "list", "tell", "why") for number in range(6))


def write_pair(directory: Path, steps: int = 150) -> tuple[Path, Path]:
    """(target, draft) directories; the draft is trained on the very answers that an experiment will replay."""
    target = write_target(directory / "target")
    draft = write_draft(
        directory / "draft",
        target_layer_ids=TAPS,
        num_target_layers=len(TAPS),
        target_num_hidden_layers=LAYERS,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    subject = open_subject(target, draft, "float32")
    recorded = subject.recorder.record(
        [subject.prompt_ids(prompt) for prompt in PROMPTS], NEW_TOKENS, subject.stop_ids, TAPS
    )
    model = load_draft(draft, K3DSparkConfig.from_file(draft), subject.target_embed, subject.target_head, torch.float32)
    learn(model, recorded, subject, steps)
    save_draft(model, draft)
    return target, draft


def write_target(directory: Path) -> Path:
    """Seven random layers, so that every tap has a neighbour on both sides."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=True, bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def learn(model: K3DSparkModel, recorded: list[Conversation], subject: Subject, steps: int) -> None:
    """Cross-entropy of every block of every answer, the previous tokens given."""
    model.embed_tokens.weight.requires_grad_(False)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.0)
    width = max(len(c.ids) for c in recorded)
    size = model.block_size
    ids = torch.stack([torch.nn.functional.pad(c.ids, (0, width - len(c.ids))) for c in recorded])
    taps = [c.read(subject.wiring.taps) for c in recorded]
    padded = torch.stack([torch.nn.functional.pad(t, (0, 0, 0, width - t.shape[0])) for t in taps])
    starts = torch.tensor([c.answer_start for c in recorded])
    anchors = starts[:, None] + torch.arange(NEW_TOKENS - size)  # [N, A]
    labels = ids.gather(1, (anchors[..., None] + 1 + torch.arange(size)).flatten(1)).view(*anchors.shape, size)
    anchor_ids = ids.gather(1, anchors)
    previous = torch.cat([anchor_ids[..., None], labels[..., :-1]], -1)
    visible = torch.arange(width) < anchors[..., None]
    for _ in range(steps):
        hidden = model.training_hidden(padded, anchor_ids, anchors, visible)
        logits = model.base_logits(hidden) + model.markov_head.bias(model.markov_head.markov_w1(previous))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# -- faults ----------------------------------------------------------------------------------------------------------


def copy(draft: Path, place: Path) -> Path:
    """A copy of a draft directory that may be broken."""
    return Path(shutil.copytree(draft, place))


def change_config(draft: Path, **changes: object) -> None:
    path = draft / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_rope(draft: Path, **changes: object) -> None:
    rope = json.loads((draft / "config.json").read_text())["rope_parameters"]
    change_config(draft, rope_parameters={**rope, **changes})


def change_tensors(draft: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace tensors of model.safetensors, keeping the dtype of those that were there."""
    tensors = load_file(draft / "model.safetensors")
    changed = change(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    )
    dtype = tensors["context_proj.weight"].dtype
    stored = {**tensors, **{n: t.to(dtype) if t.is_floating_point() else t for n, t in changed.items()}}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, draft / "model.safetensors")
