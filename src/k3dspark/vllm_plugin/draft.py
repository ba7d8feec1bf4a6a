"""The draft as vLLM's DSpark speculator calls it: context rows in, block hidden states and logits out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from k3dspark.checkpoint.files import StoredTensor, stored_tensors, weight_files
from k3dspark.checkpoint.inventory import EMBEDDING, LM_HEAD
from k3dspark.errors import BadInput
from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft
from k3dspark.vllm_plugin.cache import PagedContext, RowsLayer


class VllmDraft(nn.Module):
    """Our draft behind vLLM's interface of a K3 draft.

    A whole block is run whatever `num_speculative_tokens` is: its slots see each other, so a shorter block would be
    another draft. The embedding and the lm_head are the draft's own, or are read from the target's files.
    """

    # What vLLM would share from the target's modules is here already, unpacked and exactly as our engine has it.
    has_own_embed_tokens = True
    has_own_lm_head = True
    lm_head = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        speculation = vllm_config.speculative_config
        assert speculation is not None
        self.config = speculation.draft_model_config.hf_config
        self.proposals = speculation.num_speculative_tokens
        self._directory = Path(speculation.draft_model_config.model)
        self._target = Path(vllm_config.model_config.model)
        self._dtype = speculation.draft_model_config.dtype
        self.model = self._load()
        first, width = vllm_config.model_config.get_total_num_hidden_layers(), self.model.config.row_width
        # vLLM finds the number of a layer in its name; the target's come first.
        names = [f"{prefix}model.layers.{first + n}.self_attn" for n in range(len(self.model.layers))]
        self.rows = [RowsLayer(name, width, vllm_config, self._dtype) for name in names]
        d2t = self.model.d2t
        self.draft_id_to_target_id = None if d2t is None else d2t - torch.arange(len(d2t))

    def _load(self) -> K3DSparkModel:
        config = K3DSparkConfig.from_file(self._directory)
        if self.proposals > config.block_size:
            raise BadInput(
                f"num_speculative_tokens is {self.proposals}",
                f"this draft proposes {config.block_size} tokens a block",
                f"pass at most {config.block_size}",
            )
        if config.markov_head_type != "vanilla":
            raise BadInput(
                f"the draft's Markov head is {config.markov_head_type}",
                "vLLM's speculator gives the head the previous token only, not the hidden state",
                "use a draft with a vanilla head, or k3dspark serve",
            )
        embed, head = target_ends(self._target)
        with torch.device("cpu"):
            return load_draft(self._directory, config, embed, head, self._dtype).requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """All are loaded already, strictly and by our own reader; the stream is not touched."""
        return {name for name, _ in self.named_parameters()}

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [layer.layer_name for layer in self.rows]

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Context features [T, d] of taps [T, N·d_target]."""
        return self.model.context_features(hidden_states)

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Write the context rows of features [T, d] at positions [T]; without slots (a dry run) nothing is kept."""
        if context_slot_mapping is None:
            return
        angles = self.model.rope.angles(context_positions, torch.promote_types(self._dtype, torch.float32))
        for index, layer in enumerate(self.model.stack):
            slots = context_slot_mapping if isinstance(context_slot_mapping, Tensor) else context_slot_mapping[index]
            if slots is not None:
                self.rows[index].write(layer.self_attn.context_rows(context_states, angles), slots)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Hidden [R·N, d] of R blocks' first N slots; input_ids and positions [R·N], the anchor first in each."""
        anchors, starts = input_ids[:: self.proposals], positions[:: self.proposals]
        metadata = get_forward_context().attn_metadata
        contexts = [PagedContext(self.rows, input_ids[:0], 0)] * len(anchors)
        if isinstance(metadata, dict):
            table = metadata[self.rows[0].layer_name].block_table_tensor
            contexts = [PagedContext(self.rows, table[r], length) for r, length in enumerate(starts.tolist())]
        hidden = self.model.block_hidden(cast("list[LatentCache]", contexts), anchors.long(), starts)
        return hidden[:, : self.proposals].flatten(0, 1)

    def compute_draft_logits(self, hidden_states: Tensor) -> Tensor:
        """Base logits [R·N, D] in the draft's own vocabulary, fp32."""
        return self.model.base_logits(hidden_states)

    compute_logits = compute_draft_logits

    def map_draft_to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.model.d2t is None else self.model.d2t[draft_ids]

    def markov_embed(self, token_ids: Tensor) -> Tensor:
        return self.model.markov_head.markov_w1(token_ids.long())

    def markov_bias(self, markov_embed: Tensor) -> Tensor:
        return self.model.markov_head.bias(markov_embed)


def target_ends(directory: Path) -> tuple[Tensor | None, Tensor | None]:
    """(embedding, lm_head) out of a target's safetensors, under the names of causal models; the lm_head may be tied."""
    if not directory.is_dir():
        return None, None
    stored = stored_tensors(weight_files(directory))
    embed = _read(stored.get(EMBEDDING))
    head = _read(stored.get(LM_HEAD))
    return embed, embed if head is None else head


def _read(stored: StoredTensor | None) -> Tensor | None:
    if stored is None:
        return None
    with safe_open(stored.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(stored.entry.name)
        return tensor
