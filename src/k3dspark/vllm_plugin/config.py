"""The draft's config as vLLM sees it."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.k3_dspark import K3DSparkConfig as StockConfig


class PluginConfig(StockConfig):
    """vLLM's config, which refuses a draft vocabulary smaller than the target's: our draft maps its ids itself."""

    def __init__(self, draft_vocab_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_vocab_size = draft_vocab_size or self.vocab_size
