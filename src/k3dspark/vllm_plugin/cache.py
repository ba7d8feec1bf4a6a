"""The draft's context rows in vLLM's paged cache: one layer's place in it, and one request's view of it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout


class RowsMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Hands on what vLLM knows of a batch: the block table is all that reading rows needs."""

    def __init__(
        self, kv_cache_spec: FullAttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class RowsBackend(AttentionBackend):
    """A backend that stores rows; the draft attends over them itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "K3DSPARK_ROWS"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the draft attends over its rows itself")

    @staticmethod
    def get_builder_cls() -> type[RowsMetadataBuilder]:
        return RowsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # that of the CPU backend of the target


class RowsLayer(nn.Module, AttentionLayerBase):
    """One draft layer's context rows [blocks, 1, block_size, W], bound to vLLM's cache under `name`."""

    kv_cache: Tensor

    def __init__(self, name: str, width: int, vllm_config: VllmConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_name, self.width, self.dtype = name, width, dtype
        self.num_heads = 1
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowsBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """One row a token: no separate values."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
        )

    def write(self, rows: Tensor, slots: Tensor) -> None:
        """Put rows [T, W] in slots [T] (block · block_size + offset); negative ones are of rejected tokens."""
        kept = slots >= 0
        slots, size = slots[kept], self.kv_cache.shape[2]
        self.kv_cache[slots // size, 0, slots % size] = rows[kept].to(self.kv_cache.dtype)

    def read(self, table: Tensor, length: int) -> Tensor:
        """Rows [length, W] of the request whose blocks are `table`, in order."""
        blocks = table[: -(-length // self.kv_cache.shape[2])]
        return self.kv_cache[blocks.long(), 0].flatten(0, 1)[:length]


class PagedContext:
    """What `K3DSparkModel` reads of a request's context: `chunks` as `LatentCache` has them."""

    def __init__(self, layers: list[RowsLayer], table: Tensor, length: int) -> None:
        self._layers, self._table, self._length = layers, table, length

    def chunks(self, layer: int) -> list[Tensor]:
        return [self._layers[layer].read(self._table, self._length)] if self._length else []
