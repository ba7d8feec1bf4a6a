"""`explain_config`: every field of a config with its value, meaning, what it decides and what breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from k3dspark.checkpoint.fields import BY_NAME, ROPE_FIELDS, rope_parameters, value_of
from k3dspark.checkpoint.figures import Figure, figures
from k3dspark.checkpoint.rules import Verdict, evaluate
from k3dspark.errors import BadInput

Language = Literal["en", "zh"]

_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "architecture": (
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
    ),
    "attention": (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "mla_use_nope",
        "mla_use_output_gate",
    ),
    "positions": (
        "max_position_embeddings",
        "rope_theta",
        "rope_parameters",
        *(f"rope_parameters.{field.name}" for field in ROPE_FIELDS),
    ),
    "target": ("num_target_layers", "target_hidden_size", "target_num_hidden_layers", "target_layer_ids"),
    "heads": ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    "tokens": (
        "mask_token_id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "draft_vocab_size",
    ),
    "metadata": ("torch_dtype", "_torchspec_version", "_converted_from"),
    "switches": (
        "hidden_act",
        "block_size",
        "block_causal",
        "fc_norm",
        "aux_hidden_stream",
        "sample_from_anchor",
        "share_target_embeddings",
    ),
}


@dataclass(frozen=True)
class Explanation:
    """One field. `stated` is False where the config leaves it to its default; `problem` is a rule that failed."""

    name: str
    section: str
    value: Any
    stated: bool
    meaning: str
    decides: str
    breaks: str
    problem: str | None


@dataclass(frozen=True)
class ExplainedConfig:
    """All fields, the unknown ones by name, and the figures (empty, with `unusable` saying why, when rules fail)."""

    sections: dict[str, str]
    fields: tuple[Explanation, ...]
    unknown: tuple[str, ...]
    figures: tuple[Figure, ...]
    unusable: str | None


def explain_config(config: Mapping[str, Any], language: Language = "en", field: str | None = None) -> ExplainedConfig:
    """Explain a config mapping, or one `field` of it. Raises `BadInput` when there is no such field."""
    if language == "zh":
        from k3dspark.checkpoint.explanations_zh import FIELDS, SECTIONS
    else:
        from k3dspark.checkpoint.explanations_en import FIELDS, SECTIONS

    verdicts = [verdict for verdict in evaluate(config) if verdict.status == "fail"]
    wanted = [(section, name) for section, names in _SECTIONS.items() for name in names]
    if field is not None:
        wanted = [(section, name) for section, name in wanted if _means(name, field)]
        if not wanted:
            raise _unknown_field(field, FIELDS.keys())
    return ExplainedConfig(
        sections=SECTIONS,
        fields=tuple(_explain(config, section, name, FIELDS[name], verdicts) for section, name in wanted),
        unknown=tuple(str(key) for key in config if key not in FIELDS and key not in BY_NAME),
        figures=() if verdicts else tuple(figures(config)),
        unusable=f"{verdicts[0].field}: {verdicts[0].found}" if verdicts else None,
    )


def _means(name: str, asked: str) -> bool:
    return asked in (name, name.removeprefix("rope_parameters.")) or (name == "torch_dtype" and asked == "dtype")


def _unknown_field(field: str, names: Any) -> BadInput:
    import difflib

    known = {name.rpartition(".")[2]: None for name in names}
    near = difflib.get_close_matches(field, list(known), 3, 0.5)
    return BadInput(
        f"there is no field {field[:80]!r}",
        "config.json of a draft has no such field that this project knows",
        f"did you mean {' or '.join(near)}?" if near else "run `k3dspark explain` to list them all",
    )


def _explain(
    config: Mapping[str, Any], section: str, name: str, texts: tuple[str, str, str], verdicts: list[Verdict]
) -> Explanation:
    problems = [verdict.found for verdict in verdicts if verdict.field == name]
    value, stated = _value(config, name)
    return Explanation(name, section, value, stated, *texts, problems[0] if problems else None)


def _value(config: Mapping[str, Any], name: str) -> tuple[Any, bool]:
    outer, _, inner = name.partition(".")
    if inner:
        block = rope_parameters(config)
        stated = config.get("rope_parameters") or config.get("rope_scaling")
        return block.get(inner), isinstance(stated, Mapping) and (inner in stated or inner == "rope_type")
    if outer == "rope_parameters":
        return config.get("rope_parameters") or config.get("rope_scaling"), "rope_parameters" in config
    if name in config:
        return config[name], True
    if name in BY_NAME and not BY_NAME[name].required:
        try:
            return value_of(config, name), name == "torch_dtype" and "dtype" in config
        except (KeyError, TypeError):  # a default that follows from another field, which is missing or malformed
            return None, False
    return None, False
