"""A vLLM plugin: K3 DSpark drafts, the embedded one among them, under vLLM on CPU, where stock vLLM has none.

The draft that runs there is our own `K3DSparkModel`, its context rows in vLLM's paged cache; on other devices the
plugin does nothing. The door is `register`, which vLLM calls in every process (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

from pathlib import Path

_DRAFT = "k3dspark.vllm_plugin.draft:VllmDraft"


def register() -> None:
    """Put our draft in the place of vLLM's K3DSparkModel, on CPU only. May be called again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import ModelRegistry
    from vllm.transformers_utils import config

    from k3dspark.vllm_plugin.config import PluginConfig

    config._CONFIG_REGISTRY["k3_dspark"] = PluginConfig
    ModelRegistry.register_model("K3DSparkModel", _DRAFT)


def interpreter_path() -> Path:
    """The folder that makes Triton's interpreter a backend when it is on PYTHONPATH, of a server on CPU only."""
    return Path(__file__).parent / "interpreter"
