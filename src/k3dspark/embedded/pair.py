"""A target, its draft and its tokenizer, opened together: the embedded ones or any two directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.embedded.target import NAME, embedded_target_dir
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft
from k3dspark.model.rotation import rotation_between, undo_rotation
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_model import TapStream
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.loading import DType, conversation_ids, load_tokenizer, open_target
from k3dspark.target.protocol import Target
from k3dspark.target.transformers_target import TransformersTarget

EMBEDDED_DRAFT = Path(__file__).parent / "draft"


@dataclass(frozen=True)
class ModelPair:
    """What it takes to answer a prompt. `draft` is None for plain decoding; `stop_ids` end an answer.

    `dtype` is the format that both models compute in.
    """

    target: Target
    draft: K3DSparkModel | None
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    name: str
    dtype: torch.dtype

    def chat_ids(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids of a user's turn in the target's chat template, up to where its answer begins."""
        if not self.tokenizer.chat_template:
            raise BadInput(
                f"{self.name} has no chat template",
                "its tokenizer does not say how a user's turn is written",
                "pass --raw to continue the text as it is",
            )
        turns = [{"role": "system", "content": system}] if system is not None else []
        turns.append({"role": "user", "content": prompt})
        return conversation_ids(self.tokenizer, turns)

    def raw_ids(self, text: str) -> list[int]:
        """Token ids of a text to be continued, after the special tokens that the tokenizer puts before any text."""
        return list(self.tokenizer(text).input_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of new tokens, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_embedded_pair(*, dtype: DType = "auto", threads: int | None = None, with_draft: bool = True) -> ModelPair:
    """The packaged pair; the first call on a machine converts its target, which takes about half a minute.

    `dtype` "auto" takes what is fastest here. `threads` are PyTorch's; None leaves them as they are.
    """
    return load_pair(None, EMBEDDED_DRAFT if with_draft else None, dtype=dtype, threads=threads)


def load_pair(
    target: Path | None, draft: Path | None, *, dtype: DType = "auto", threads: int | None = None
) -> ModelPair:
    """A target directory (None: the embedded one) with a draft directory (None: no draft).

    Raises `BadInput` when a directory is not what it should be, or the draft does not fit the target.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    # The draft's config first: it is small, and it names the taps that the target is opened with.
    config = K3DSparkConfig.from_file(draft) if draft is not None else None
    directory = target if target is not None else embedded_target_dir()
    taps = config.target_layer_ids if config is not None else ()
    opened = open_target(directory, dtype, taps, tap_stream=tap_stream(config))
    tokenizer = load_tokenizer(directory)
    return ModelPair(
        target=opened,
        draft=_draft_beside(opened, draft, config) if draft is not None else None,
        tokenizer=tokenizer,
        stop_ids=stop_ids(directory, tokenizer),
        name=NAME if target is None else target.resolve().name,
        dtype=activations(opened),
    )


def _draft_beside(target: Target, directory: Path, config: K3DSparkConfig | None) -> K3DSparkModel:
    """The draft in the target's dtype, sharing the target's embedding and head where it has none of its own."""
    embed, head = embedding_and_head(target)
    return draft_for(directory, config, embed, head, activations(target)).eval().pack()


def activations(target: Target) -> torch.dtype:
    """The format that a target computes in."""
    return target.embed(torch.zeros(1, dtype=torch.long)).dtype


def embedding_and_head(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """The two matrices [V, d] of an opened target."""
    if isinstance(target, (LlamaTarget, KimiK3Target)):
        return target.embed_weight, target.head_weight
    if isinstance(target, TransformersTarget):
        model = target.model
        return model.get_input_embeddings().weight, model.get_output_embeddings().weight
    raise TypeError(f"open_target returned a {type(target).__name__}")


def draft_for(
    directory: Path, config: K3DSparkConfig | None, embed: torch.Tensor, head: torch.Tensor, dtype: torch.dtype
) -> K3DSparkModel:
    """A draft beside a target with this embedding and head, which it shares where it has none of its own.

    One whose embedding is the target's before a rotation reads the taps through the inverse rotation.
    """
    draft = load_draft(directory, config, embed, head, dtype)
    rotation = rotation_between(draft.embed_tokens.weight, embed.to(dtype))
    if rotation is not None:  # a target quantised with QuaRot
        undo_rotation(draft, rotation)
    return draft


def tap_stream(config: K3DSparkConfig | None) -> TapStream:
    """Which stream of its target a draft was trained on."""
    return "attn_res" if config is not None and config.aux_hidden_stream == "attn_res" else "prefix"


def stop_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that the directory's generation config, its config or its tokenizer calls the end of a sequence."""
    generation = directory / "generation_config.json"
    named = (
        read_object(generation).get("eos_token_id") if generation.is_file() else None,
        read_object(directory / "config.json").get("eos_token_id"),
        tokenizer.eos_token_id,
    )
    found: list[int] = []
    for value in named:
        ids = value if isinstance(value, list) else [value]
        found += [token for token in ids if isinstance(token, int) and token not in found]
    return tuple(found)
