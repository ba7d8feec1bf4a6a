"""The pair that is experimented on: a draft taken apart, and a target that answers and keeps its taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from k3dspark.diagnosis.capture import BatchRecorder, EngineRecorder, Recorder
from k3dspark.diagnosis.wiring import Stream, Wiring
from k3dspark.embedded.pair import EMBEDDED_DRAFT, draft_for, embedding_and_head, stop_ids, tap_stream
from k3dspark.embedded.target import NAME, embedded_target_dir
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig
from k3dspark.target.checks import check_taps
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.loading import DType, conversation_ids, load_tokenizer, model_directory, open_target, precision
from k3dspark.target.protocol import Target
from k3dspark.target.transformers_target import TransformersTarget
from k3dspark.target.weights import load_llama, read_config, unsupported_reason


@dataclass(frozen=True)
class Subject:
    """`wide` gives the draft's wiring in fp32; None where `wiring` already is."""

    name: str
    draft_name: str
    wiring: Wiring
    recorder: Recorder
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    target_embed: Tensor
    target_head: Tensor
    target_theta: float | None
    wide: Callable[[], Wiring] | None = None

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer reserves, ascending."""
        added = {int(token) for token, content in self.tokenizer.added_tokens_decoder.items() if content.special}
        return tuple(sorted(added | {int(token) for token in self.tokenizer.all_special_ids}))

    def prompt_ids(self, prompt: str) -> list[int]:
        """A user's turn in the target's chat template; the text itself where it has none."""
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(prompt).input_ids)
        return conversation_ids(self.tokenizer, [{"role": "user", "content": prompt}])


def open_subject(target: Path | None, draft: Path | None, dtype: DType = "auto") -> Subject:
    """A target directory (None: the embedded one) with a draft directory (None: the embedded one).

    `dtype` is what the draft computes in. Raises `BadInput` when a directory is not what it should be, or the draft
    cannot read this target at all.
    """
    place = draft if draft is not None else EMBEDDED_DRAFT
    config = K3DSparkConfig.from_file(place)
    directory = model_directory(target if target is not None else embedded_target_dir())
    source = read_config(directory)
    embed, head, recorder = _open_target(directory, source, config, dtype)
    _require_fit(config, recorder, embed)

    def loaded(width: torch.dtype) -> Wiring:
        return Wiring.of(draft_for(place, config, embed, head, width))

    computed = precision(dtype)
    tokenizer = load_tokenizer(directory)
    return Subject(
        name=NAME if target is None else target.resolve().name,
        draft_name="the embedded draft" if draft is None else draft.resolve().name,
        wiring=loaded(computed),
        recorder=recorder,
        tokenizer=tokenizer,
        stop_ids=stop_ids(directory, tokenizer),
        target_embed=embed,
        target_head=head,
        target_theta=_theta(source),
        wide=None if computed == torch.float32 else lambda: loaded(torch.float32),
    )


def _open_target(
    directory: Path, source: dict[str, Any], config: K3DSparkConfig, dtype: DType
) -> tuple[Tensor, Tensor, Recorder]:
    if unsupported_reason(source) is None:
        weights = load_llama(directory, torch.float32)
        return weights.embed, weights.head, BatchRecorder(weights)
    opened = open_target(directory, dtype, config.target_layer_ids, tap_stream=tap_stream(config))
    embed, head = embedding_and_head(opened)
    if isinstance(opened, KimiK3Target):
        model = opened.model
        streams: tuple[Stream, ...] = ("prefix", "attn_res")

        def k3(layers: Sequence[int], stream: Stream) -> Target:
            return KimiK3Target(model, layers, stream)

        return embed, head, EngineRecorder(k3, range(model.shape.layers), streams)
    assert isinstance(opened, TransformersTarget)
    network = opened.model

    def adapted(layers: Sequence[int], stream: Stream) -> Target:
        return TransformersTarget(network, layers)

    # transformers reports the last layer only after the final norm, so it cannot be tapped.
    layers = range(int(network.config.get_text_config(decoder=True).num_hidden_layers) - 1)
    return embed.detach(), head.detach(), EngineRecorder(adapted, layers)


def _require_fit(config: K3DSparkConfig, recorder: Recorder, embed: Tensor) -> None:
    check_taps(config.target_layer_ids, len(recorder.layers))
    for name, of_draft, of_target in (
        ("target_hidden_size", config.target_hidden_size, embed.shape[1]),
        ("vocab_size", config.vocab_size, embed.shape[0]),
    ):
        if of_draft != of_target:
            raise BadInput(
                f"the draft's {name} is {of_draft}, the target has {of_target}",
                "this draft was made for another target, and no experiment can change that",
                "give the target named by the draft's model card",
            )


def _theta(source: dict[str, Any]) -> float | None:
    inner = source.get("rope_parameters")
    theta = source.get("rope_theta") or (inner.get("rope_theta") if isinstance(inner, dict) else None)
    return float(theta) if isinstance(theta, int | float) else None
