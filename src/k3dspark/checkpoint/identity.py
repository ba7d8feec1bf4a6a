"""Which public K3 draft a config belongs to, and whether this project runs it (spec §G.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from k3dspark.checkpoint.fields import BY_NAME, value_of


@dataclass(frozen=True)
class PublicDraft:
    """A published draft: the config values that single it out, and what running it needs.

    `switches` are values its config may leave unsaid although another default would be wrong for it.
    """

    names: tuple[str, ...]
    marks: Mapping[str, Any]
    runs: bool
    note: str
    switches: Mapping[str, Any] = field(default_factory=dict)


_MLA: Final = {"model_type": "k3_dspark"}

PUBLIC_DRAFTS: Final = (
    PublicDraft(
        (
            "Eco-Tech/Kimi-K3-DSpark-MLA-NPU",
            "Inferact/Kimi-K3-DSpark",
            "slippedJim/Kimi-K3-Draft",
            "slippedJim/K3_draft",
        ),
        {**_MLA, "num_hidden_layers": 5, "num_attention_heads": 64, "target_layer_ids": [2, 23, 47, 71, 89]},
        True,
        "five MLA layers, bidirectional block of 7, raw prefix-sum taps of Kimi K3; the layout is one, weights differ",
    ),
    PublicDraft(
        ("lightseekorg/kimi-k3-dspark",),
        {**_MLA, "num_hidden_layers": 5, "num_attention_heads": 64, "target_layer_ids": [7, 31, 47, 63, 87]},
        True,
        "a norm for each tap, and taps of the AttnRes mixture; use a revision after its rope fix",
        {"fc_norm": True, "aux_hidden_stream": "attn_res"},
    ),
    PublicDraft(
        ("Inferact/Kimi-K3-DSpark-Block5",),
        {**_MLA, "num_hidden_layers": 3, "num_attention_heads": 96},
        True,
        "three causal MLA layers, block of 5, Markov rank 512",
        {"block_causal": True, "block_size": 5},
    ),
    PublicDraft(
        ("Inferact/Kimi-K3.1-Pro-DSpark-preview",),
        {**_MLA, "num_hidden_layers": 5, "num_attention_heads": 96},
        True,
        "five causal MLA layers for Kimi K3.1 Pro, which is another target than Kimi K3; it shares the embedding",
        {"block_causal": True},
    ),
    PublicDraft(
        ("riverclouds/Kimi-K3-DSpark-for-8L-dummy",),
        {**_MLA, "num_attention_heads": 64, "target_layer_ids": [0, 1, 4, 6, 7]},
        True,
        "a config without weights, for load tests with an 8-layer dummy target",
    ),
    PublicDraft(
        ("RadixArk/Kimi-K3-DSpark",),
        {"num_attention_heads": 64, "num_key_value_heads": 16, "target_layer_ids": [7, 23, 51, 67, 83]},
        False,
        "grouped-query attention of the qwen3 kind; this project runs MLA drafts",
    ),
    PublicDraft(
        ("LithosAI/Kimi-K3.1-Pro-DSpark",),
        {"num_attention_heads": 64, "num_key_value_heads": 16, "target_layer_ids": [7, 23, 67, 83, 91]},
        False,
        "grouped-query attention, for Kimi K3.1 Pro; this project runs MLA drafts",
    ),
    PublicDraft(
        ("drafts of NVIDIA NeMo's K3 trainer",),
        {"num_hidden_layers": 3, "target_layer_ids": [90, 91, 92]},
        False,
        "no rotary positions, an output gate and a SiTU MLP: another network than this project's",
    ),
)
_SPECULATORS: Final = PublicDraft(
    ("RedHatAI/Kimi-K3-speculator.dspark, or another draft in the speculators format",),
    {},
    False,
    "the speculators format with sliding-window attention; this project runs MLA drafts",
)


def identify(config: Mapping[str, Any]) -> PublicDraft | None:
    """The public draft whose geometry this config has, or None when it is a geometry of its own."""
    if "speculators_config" in config or "speculators_model_type" in config:
        return _SPECULATORS
    for draft in PUBLIC_DRAFTS:
        if all(config.get(name) == value for name, value in draft.marks.items()):
            return draft
    return None


def unsaid_switches(config: Mapping[str, Any], draft: PublicDraft) -> list[tuple[str, Any, Any]]:
    """(field, value here, value that this public draft needs) where they differ."""
    return [
        (name, value_of(config, name), needed)
        for name, needed in draft.switches.items()
        if name in BY_NAME and value_of(config, name) != needed
    ]
