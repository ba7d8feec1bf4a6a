"""How vLLM's hybrid cache manager lays out Kimi K3's cache, and what joining the draft's five layers costs there.

Layers of one kind form a bucket (24 MLA, 69 KDA in Kimi K3). All groups get the same number of layers, so the larger
bucket is padded with layers that hold nothing; the draft's MLA layers join the target's and change that number.
Checked against the engine's own messages: 3 padding layers (4.35 %) alone, 18 (26.09 %) with the draft
(vllm-ascend#14314), and 384-token blocks at tensor parallel 16 (vllm-ascend#14765).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# The engine's own threshold: buckets of nearly equal size take the larger one as the group size.
_NEARLY_EQUAL: Final = 1.5
# Attention kernels take whole multiples of this many tokens in a block.
_BLOCK_ALIGNMENT: Final = 128


@dataclass(frozen=True)
class TargetLayout:
    """What of the target shapes its cache: full-attention layers with latent rows, recurrent layers with states."""

    attention_layers: int = 24
    row_bytes: int = (512 + 64) * 2
    recurrent_layers: int = 69
    recurrent_heads: int = 96
    recurrent_head_dim: int = 128
    convolution: int = 4

    def state_bytes(self, tensor_parallel: int) -> int:
        """One recurrent layer's state of one sequence on one device: fp32 matrices, bf16 convolution inputs."""
        heads = math.ceil(self.recurrent_heads / tensor_parallel)
        matrices = heads * self.recurrent_head_dim**2 * 4
        inputs = 3 * heads * self.recurrent_head_dim * (self.convolution - 1) * 2
        return matrices + inputs


@dataclass(frozen=True)
class CacheGroups:
    """The layout on one device. A block holds `block_tokens` rows of `group_layers` layers, or as many states."""

    group_layers: int
    attention_groups: int
    recurrent_groups: int
    padding_layers: int
    recurrent_layers: int
    block_tokens: int
    block_bytes: int
    state_blocks: int

    @property
    def padding_share(self) -> float:
        """Padding layers over the layers of the padded kind, as the engine prints it."""
        return self.padding_layers / self.recurrent_layers if self.recurrent_layers else 0.0

    def request_bytes(self, tokens: int) -> int:
        """What one sequence of `tokens` tokens reserves on one device; latent rows are not split by tensor parallel."""
        rows = self.attention_groups * math.ceil(tokens / self.block_tokens)
        return (rows + self.recurrent_groups * self.state_blocks) * self.block_bytes


def cache_groups(target: TargetLayout, draft_layers: int, draft_tokens: int, tensor_parallel: int) -> CacheGroups:
    """The groups of target and draft; `draft_layers` 0 is the target alone. Recurrent layers keep one state for each
    drafted token beside the current one, to roll back to."""
    attention = target.attention_layers + draft_layers
    buckets = [layers for layers in (attention, target.recurrent_layers) if layers]
    size = max(buckets) if max(buckets) < min(buckets) * _NEARLY_EQUAL else min(buckets)
    state = target.state_bytes(tensor_parallel)
    needed = math.ceil(state / target.row_bytes) if target.recurrent_layers else 1
    block_tokens = math.ceil(needed / _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
    return CacheGroups(
        group_layers=size,
        attention_groups=math.ceil(attention / size),
        recurrent_groups=math.ceil(target.recurrent_layers / size),
        padding_layers=sum(-layers % size for layers in buckets),
        recurrent_layers=target.recurrent_layers,
        block_tokens=block_tokens,
        block_bytes=size * block_tokens * target.row_bytes,
        state_blocks=1 + (draft_tokens if draft_layers else 0),
    )


@dataclass(frozen=True)
class JoiningCost:
    """What the draft adds to the cache of one sequence, in bytes on one device."""

    tokens: int
    alone: int
    joined: int
    rows: int

    @property
    def padding(self) -> int:
        """Bytes beyond the draft's own rows: padding layers, and the states that rollback needs."""
        return self.joined - self.alone - self.rows


def joining_cost(
    target: TargetLayout, draft_layers: int, draft_tokens: int, tensor_parallel: int, tokens: int
) -> JoiningCost:
    """The cache of one sequence of `tokens` tokens with and without the draft."""
    alone = cache_groups(target, 0, 0, tensor_parallel).request_bytes(tokens)
    joined = cache_groups(target, draft_layers, draft_tokens, tensor_parallel).request_bytes(tokens)
    return JoiningCost(tokens, alone, joined, draft_layers * target.row_bytes * tokens)
