"""The tiny target that goes with the tiny draft: a Llama of 8 layers with a byte tokenizer, as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.inventory import TensorSpec, file_order
from k3dspark.checkpoint.published import tiny_config

LAYERS: Final = 8
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 8
INNER: Final = 64

_NAMED: Final = {256: "[BOS]", 257: "[EOS]", 258: "<|end_of_msg|>", 318: "[UNK]", 319: "[PAD]"}


def target_config() -> dict[str, Any]:
    """config.json of the tiny target."""
    draft = tiny_config()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": draft["target_hidden_size"],
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "vocab_size": draft["vocab_size"],
        "max_position_embeddings": draft["max_position_embeddings"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": draft["bos_token_id"],
        "eos_token_id": 257,
        "pad_token_id": draft["pad_token_id"],
        "torch_dtype": "float32",
    }


def target_tensors() -> list[TensorSpec]:
    """Tensors of the tiny target, in file order; its embedding and lm_head are those of the tiny draft."""
    config = target_config()
    d, v = config["hidden_size"], config["vocab_size"]
    heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (v, d),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (d,),
            f"{prefix}post_attention_layernorm.weight": (d,),
            f"{prefix}self_attn.q_proj.weight": (heads, d),
            f"{prefix}self_attn.k_proj.weight": (kv, d),
            f"{prefix}self_attn.v_proj.weight": (kv, d),
            f"{prefix}self_attn.o_proj.weight": (d, heads),
            f"{prefix}mlp.gate_proj.weight": (INNER, d),
            f"{prefix}mlp.up_proj.weight": (INNER, d),
            f"{prefix}mlp.down_proj.weight": (d, INNER),
        }
    return file_order(TensorSpec(name, "F32", shape, ()) for name, shape in shapes.items())


def write_target_text(directory: Path) -> None:
    """Tokenizer (256 bytes, then 64 special tokens, placed as Kimi K3 places its 256), template and defaults."""
    write_json(directory / "tokenizer.json", _tokenizer())
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "model_max_length": tiny_config()["max_position_embeddings"],
            "added_tokens_decoder": {
                str(token): {"content": content, "special": True} for token, content in _special_tokens().items()
            },
            "chat_template": (
                "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end_of_msg|>{% endfor %}"
                "{% if add_generation_prompt %}assistant: {% endif %}"
            ),
        },
    )
    write_json(directory / "generation_config.json", {"eos_token_id": [257, 258], "do_sample": False})


def _special_tokens() -> dict[int, str]:
    vocabulary = tiny_config()["vocab_size"]
    return {token: _NAMED.get(token, f"<|reserved_{token}|>") for token in range(256, vocabulary)}


def _tokenizer() -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, content in _special_tokens().items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself, or one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
