"""`K3DSparkConfig`: a draft's config.json as a transformers config class."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from k3dspark.checkpoint import fields as checkpoint_fields
from k3dspark.checkpoint.fields import FIELDS, value_of
from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.published import published_config
from k3dspark.checkpoint.rules import require

# Not plain attributes here: transformers keeps the first two itself, the others feed `rope_parameters` and
# `block_causal`.
_NOT_ATTRIBUTES = {"model_type", "torch_dtype", "dtype", "rope_scaling", "dflash_config", "full_attention_causal"}


class K3DSparkConfig(PreTrainedConfig):
    """Every field of config.json under its own name; `checkpoint/fields.py` lists them with their defaults.

    A wrong or missing value raises `BadInput` naming the field (`checkpoint/rules.py`). Keys this class does not know,
    and the spelling of those it does, survive a round trip unchanged.
    """

    model_type = "k3_dspark"

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: bool
    mla_use_output_gate: bool
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_parameters: dict[str, Any]
    num_target_layers: int
    target_hidden_size: int
    target_num_hidden_layers: int
    target_layer_ids: list[int]
    mask_token_id: int
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    tie_word_embeddings: bool
    share_target_embeddings: bool
    hidden_act: str
    block_size: int
    block_causal: bool
    fc_norm: bool
    aux_hidden_stream: str
    sample_from_anchor: bool

    def __init__(self, **values: Any) -> None:
        values = copy.deepcopy(values)
        values.setdefault("model_type", self.model_type)
        for key in ("torch_dtype", "dtype"):
            if isinstance(values.get(key), torch.dtype):
                values[key] = str(values[key]).removeprefix("torch.")
        require({key: value for key, value in values.items() if not key.startswith("_")})

        known = {field.name for field in FIELDS}
        super().__init__(dtype=value_of(values, "torch_dtype"))
        self.name_or_path = values.get("name_or_path") or ""  # a key of the file like any other: it stays in the source
        for field in FIELDS:
            if field.name not in _NOT_ATTRIBUTES:
                setattr(self, field.name, value_of(values, field.name))
        self.rope_parameters = checkpoint_fields.rope_parameters(values)
        for key, value in values.items():
            # A key that happens to be the name of a method or property stays in the file, not on the object.
            if key not in known and not hasattr(type(self), key):
                setattr(self, key, copy.deepcopy(value))
        self._source = values
        self._snapshot = copy.deepcopy(self._plain())

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers calls it; where the file was found is noted on the object, not added to its keys."""
        found = kwargs.pop("name_or_path", None)
        result = super().from_dict(config_dict, **kwargs)
        if found is not None:
            (result[0] if isinstance(result, tuple) else result).name_or_path = found
        return result

    @classmethod
    def from_file(cls, path: str | Path) -> K3DSparkConfig:
        """From a config.json or the directory that holds it. Raises `BadInput` naming what is wrong with it."""
        path = Path(path)
        mapping = read_config(path)
        require(mapping, str(path / "config.json" if path.is_dir() else path))
        return cls(**mapping)

    @classmethod
    def published(cls) -> K3DSparkConfig:
        """The published five-layer K3 MLA draft."""
        return cls(**published_config())

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the unrotated part, then the rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """σ_s (spec §A.6); 0.1308608 for the published draft."""
        return checkpoint_fields.softmax_scale(self._plain())

    @property
    def rope_multiplier(self) -> float:
        """μ of the cos/sin table (spec §A.6); 1 for the published draft."""
        return checkpoint_fields.rope_multiplier(self._plain())

    @property
    def context_width(self) -> int:
        """Numbers in one row of taps: one target hidden state for each tapped layer."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def row_width(self) -> int:
        """Numbers in one context row of one layer: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def torch_dtype(self) -> str | torch.dtype | None:
        return self.dtype

    @torch_dtype.setter
    def torch_dtype(self, value: Any) -> None:
        self.dtype = value

    def mapping(self) -> dict[str, Any]:
        """config.json's content: what was read, with what has been changed since."""
        result = copy.deepcopy(self._source)
        now = self._plain()
        for key, value in now.items():
            if key in self._snapshot and self._snapshot[key] == value:
                continue
            result["dtype" if "dtype" in result and key == "torch_dtype" else key] = copy.deepcopy(value)
            if key == "rope_parameters":
                result.pop("rope_scaling", None)
                if "rope_theta" in result:
                    result["rope_theta"] = value["rope_theta"]
        return result

    def to_dict(self) -> dict[str, Any]:
        return self.mapping()

    def to_diff_dict(self) -> dict[str, Any]:
        return self.mapping()

    def _get_generation_parameters(self) -> dict[str, Any]:
        # transformers would refuse to save a config that carries, say, a temperature; unknown keys are kept as read.
        return {}

    def _plain(self) -> dict[str, Any]:
        """Public attributes by config.json's names."""
        plain = {key: value for key, value in self.__dict__.items() if not key.startswith("_") and key != "dtype"}
        plain["torch_dtype"] = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return plain


def register() -> None:
    """Let transformers' `AutoConfig` find the class; importing this module has done it. Safe to repeat."""
    AutoConfig.register(K3DSparkConfig.model_type, K3DSparkConfig, exist_ok=True)


register()
