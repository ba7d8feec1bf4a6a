"""Model directories small enough to build in a test: a random Llama with a byte tokenizer, and a draft for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import save_draft

VOCABULARY = 260  # 256 bytes and four special tokens
HIDDEN = 32
LAYERS = 3
POSITIONS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_target(directory: Path, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A random Llama as transformers saves it, tokenizer and generation config included."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.3,  # large enough that greedy decoding does not repeat one token for ever
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer(chat_template).save_pretrained(directory)
    return directory


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = chat_template
    return fast


def write_pair(root: Path) -> tuple[Path, Path]:
    """(target, draft) below `root`, made for each other."""
    return write_target(root / "target"), write_draft(root / "draft")


def write_draft(directory: Path, seed: int = 1, **changes: object) -> Path:
    """A random draft for `write_target`'s model, which takes its embedding and lm_head from there."""
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "target_hidden_size": HIDDEN,
        "target_num_hidden_layers": LAYERS,
        "num_target_layers": 2,
        "target_layer_ids": [0, 2],
        "mask_token_id": 259,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "share_target_embeddings": True,
        "block_size": 7,
        "torch_dtype": "float32",
    }
    torch.manual_seed(seed)
    draft = K3DSparkModel(K3DSparkConfig(**(fields | changes)))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    save_draft(draft, directory)
    return directory
