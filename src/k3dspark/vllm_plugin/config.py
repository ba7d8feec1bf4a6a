"""The draft's config as vLLM sees it."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.configs.k3_dspark import K3DSparkConfig as StockConfig


class PluginConfig(StockConfig):
    """vLLM's config. That refuses a draft vocabulary smaller than the target's, but our draft maps its ids itself; and
    it needs `architectures`, which published K3 drafts leave out."""

    def __init__(self, draft_vocab_size: int | None = None, **kwargs: Any) -> None:
        kwargs["architectures"] = kwargs.get("architectures") or ["K3DSparkModel"]
        super().__init__(**kwargs)
        self.block_vocab_size = draft_vocab_size or self.vocab_size
