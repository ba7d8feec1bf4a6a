"""Tiny random models, written to disk by transformers and opened as any model would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from k3dspark.target.protocol import RaggedRows, Target, TargetOutput

VOCABULARY = 61
LAYERS = 3
POSITIONS = 700

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 44,  # no multiple of a vector: the last columns go through scalar code
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": POSITIONS,
    "rope_theta": 500.0,
    "initializer_range": 0.2,  # the default makes all logits nearly equal
}


def llama(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**{**GEOMETRY, **changes})


def qwen2(**changes: Any) -> transformers.PreTrainedConfig:
    geometry = {name: value for name, value in GEOMETRY.items() if name != "head_dim"}
    return transformers.Qwen2Config(**{**geometry, **changes})


def qwen3(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**{**GEOMETRY, **changes})


def make_model(config: transformers.PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a forgotten one
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save(model: transformers.PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def run(target: Target, sequence: int, ids: torch.Tensor, keep: int | None = None) -> TargetOutput:
    """One forward of one sequence, of which `keep` rows (all, if not given) are committed."""
    output = target.forward(RaggedRows((sequence,), (len(ids),), ids))
    target.commit(sequence, len(ids) if keep is None else keep)
    return output


def random_parts(total: int, largest: int, seed: int) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive parts of 0..total."""
    generator = torch.Generator().manual_seed(seed)
    first = 0
    while first < total:
        count = min(total - first, int(torch.randint(1, largest + 1, (1,), generator=generator)))
        yield first, count
        first += count


def reference(
    model: transformers.PreTrainedModel, ids: torch.Tensor, taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and taps [T, N*d] of one cacheless transformers forward."""
    with torch.no_grad():
        output = model(ids[None], output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    return output.logits[0], torch.cat([states[0][0, :, :0], *(states[layer + 1][0] for layer in taps)], -1)
