"""A draft taken apart, so that one thing at a time can be changed and the whole put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.rope import Rope

Stream = Literal["prefix", "attn_res"]


class Tap(NamedTuple):
    """Where a tap is taken: the output of a layer (0-based), in one of the target's streams."""

    layer: int
    stream: Stream


@dataclass(frozen=True)
class Wiring:
    """Everything that decides what a draft proposes: its config, its tensors, and how the target feeds it.

    `head` [D, d] has the rows of the draft vocabulary. `taps` are what the column blocks of context_proj read, in
    their order. `block_offset` is added to the positions of the block, not to those of the context. Tensors are shared
    between wirings, never written.
    """

    mapping: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    head: Tensor
    taps: tuple[Tap, ...]
    block_offset: int = 0

    @classmethod
    def of(cls, draft: K3DSparkModel) -> Wiring:
        """The wiring of a loaded draft, as its config.json describes it."""
        assert draft.lm_head is not None
        config = draft.config
        stream: Stream = "attn_res" if config.aux_hidden_stream == "attn_res" else "prefix"
        return cls(
            config.mapping(),
            {name: tensor.detach() for name, tensor in draft.state_dict().items()},
            draft.lm_head.detach(),
            tuple(Tap(layer, stream) for layer in config.target_layer_ids),
        )

    @property
    def config(self) -> K3DSparkConfig:
        return K3DSparkConfig(**self.mapping)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["context_proj.weight"].dtype

    def with_config(self, **changed: Any) -> Wiring:
        """With other values in config.json."""
        return replace(self, mapping={**self.mapping, **changed})

    def with_rope(self, rope: Mapping[str, Any]) -> Wiring:
        """With another rope_parameters block, complete with rope_theta; other spellings of it go."""
        mapping = {key: value for key, value in self.mapping.items() if key != "rope_scaling"}
        return replace(self, mapping={**mapping, "rope_parameters": dict(rope), "rope_theta": rope["rope_theta"]})

    def with_tensors(self, changed: Mapping[str, Tensor]) -> Wiring:
        """With other values in some tensors."""
        return replace(self, tensors={**self.tensors, **changed})

    def with_taps(self, taps: Sequence[Tap]) -> Wiring:
        """Reading other taps."""
        return replace(self, taps=tuple(taps))

    def model(self) -> K3DSparkModel:
        """The draft put together, sharing these tensors."""
        config = self.config
        with torch.device("meta"):
            model = K3DSparkModel(config)
        model.load_state_dict(dict(self.tensors), strict=True, assign=True)
        model.lm_head = self.head
        model.rope = Rope.from_parameters(config.qk_rope_head_dim, config.rope_parameters)  # it was made on meta
        return model.requires_grad_(False).eval()
