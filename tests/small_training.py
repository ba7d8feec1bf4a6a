"""A six-layer random target and shards of its own answers, made once for all training tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from k3dspark.model.draft import K3DSparkModel
from k3dspark.target.batch import BatchForward
from k3dspark.target.weights import LlamaWeights, load_llama
from k3dspark.training.initialise import initialise
from k3dspark.training.pipeline import DraftShape, default_taps, draft_config
from k3dspark.training.regenerate import RegenerateSettings, Regenerator
from k3dspark.training.teacher import Donor
from tiny_models import CHAT_TEMPLATE, VOCABULARY, byte_tokenizer

SHAPE = DraftShape(
    layers=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, markov_rank=8,
    draft_vocab_size=VOCABULARY,
)  # fmt: skip


def write_deep_target(directory: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def regenerator(
    weights: LlamaWeights, seed: int = 0, held_out: list[str] | None = None, **changes: object
) -> Regenerator:
    settings = RegenerateSettings(seed=seed, group=12, max_answer_tokens=24, max_prompt_tokens=12, **changes)  # type: ignore[arg-type]
    forward = BatchForward(weights, tuple(default_taps(weights.shape.layers)))
    return Regenerator(forward, byte_tokenizer(CHAT_TEMPLATE), [257], settings, held_out or [])


def small_draft(weights: LlamaWeights, taps: torch.Tensor, **changes: object) -> K3DSparkModel:
    config = draft_config(weights.shape, SHAPE, (257,))
    for name, value in changes.items():
        setattr(config, name, value)
    return initialise(config, Donor.of_llama(weights), None, taps, seed=0)


__all__ = ["SHAPE", "load_llama", "regenerator", "save_file", "small_draft", "write_deep_target"]
