"""The target a draft is trained for, whichever family it is of: sizes, starting values, a forward for many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape, is_kimi_k3
from k3dspark.errors import BadInput
from k3dspark.target.batch import BatchForward, Stepped
from k3dspark.target.kimi_k3_batch import KimiK3BatchForward
from k3dspark.target.kimi_k3_loading import load_kimi_k3
from k3dspark.target.kimi_k3_model import KimiK3Model, TapStream
from k3dspark.target.weights import LlamaShape, LlamaWeights, load_llama, read_config


class TargetShape(Protocol):
    """What a new draft takes over from its target."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True)
class DenseMlp:
    """A SwiGLU of the target that a layer of the draft may start from."""

    gate_up: Tensor  # [2 * inner, d]
    down: Tensor  # [d, inner]
    norm: Tensor  # [d], of its input


@dataclass(frozen=True)
class Donor:
    """The tensors of a target that a new draft starts from; `mlps` are its last ones, none where they are no SwiGLU."""

    embed: Tensor  # [V, d]
    head: Tensor  # [V, d]
    final_norm: Tensor  # [d]
    mlps: tuple[DenseMlp, ...] = ()

    @classmethod
    def of_llama(cls, weights: LlamaWeights) -> Donor:
        mlps = tuple(DenseMlp(layer.gate_up, layer.down, layer.post_norm) for layer in weights.layers)
        return cls(weights.embed, weights.head, weights.final_norm, mlps)

    @classmethod
    def of_kimi_k3(cls, model: KimiK3Model) -> Donor:
        return cls(model.embed_weight, model.head_weight, model.norm)


@dataclass(frozen=True)
class Teacher:
    """A target directory, its weights unread until they are asked for."""

    directory: Path
    config: dict[str, Any]
    shape: TargetShape
    stream: TapStream = "prefix"

    @classmethod
    def at(cls, directory: Path, stream: TapStream = "prefix") -> Teacher:
        """Raises `BadInput` when the directory holds no target that can be trained on, or has no such stream."""
        config = read_config(directory)
        if is_kimi_k3(config):
            return cls(directory, config, KimiK3Shape.from_config(config), stream)
        if stream != "prefix":
            raise BadInput(
                f"the target has no stream {stream}", "only Kimi K3 has attention residuals", "leave out --stream"
            )
        return cls(directory, config, LlamaShape.from_config(config))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ends of a turn that its config.json names."""
        text = self.config.get("text_config")
        value = (text if isinstance(text, dict) else self.config).get("eos_token_id")
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else ()

    def donor(self) -> Donor:
        """Its embedding, head and what else a draft can start from, in fp32."""
        if isinstance(self.shape, KimiK3Shape):
            return Donor.of_kimi_k3(self._kimi_k3())
        return Donor.of_llama(load_llama(self.directory))

    def forward(self, tap_layer_ids: Sequence[int]) -> Stepped:
        """It, answering many prompts at once, in fp32."""
        if isinstance(self.shape, KimiK3Shape):
            return KimiK3BatchForward(self._kimi_k3(), tap_layer_ids, self.stream)
        return BatchForward(load_llama(self.directory), tuple(tap_layer_ids))

    def _kimi_k3(self) -> KimiK3Model:
        return load_kimi_k3(self.directory, self.config, torch.float32)
