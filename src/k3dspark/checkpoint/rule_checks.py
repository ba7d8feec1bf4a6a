"""The conditions behind the config rules: each returns what was found instead, or None when it holds.

They may assume what `rules.evaluate` guarantees: every field they read is of its kind and within its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from k3dspark.checkpoint.fields import describe, rope_parameters, stated_causality, value_of

Config = Mapping[str, Any]


def yarn(config: Config) -> bool:
    return rope_parameters(config).get("rope_type") == "yarn"


def get(config: Config, *names: str) -> list[Any]:
    return [value_of(config, name) for name in names]


def theta_stated(config: Config) -> str | None:
    return "it is stated nowhere" if value_of(config, "rope_theta") is None else None


def theta_agrees(config: Config) -> str | None:
    outer, inner = config.get("rope_theta"), rope_parameters(config)["rope_theta"]
    if outer is None or outer == inner:
        return None
    return f"it is {describe(outer)}, but rope_parameters.rope_theta is {describe(inner)}"


def yarn_has(name: str) -> Callable[[Config], str | None]:
    return lambda config: "it is missing" if rope_parameters(config).get(name) is None else None


def product(config: Config) -> str | None:
    factor, original, longest = get(
        config,
        "rope_parameters.factor",
        "rope_parameters.original_max_position_embeddings",
        "max_position_embeddings",
    )
    if factor * original == longest:
        return None
    return f"{factor:g} × {original} = {factor * original:.0f}, but max_position_embeddings is {longest}"


def product_blame(config: Config) -> str:
    """The one of the three that differs from the published draft, when the other two do not."""
    different = [name for name, published in PUBLISHED_WINDOW.items() if value_of(config, name) != published]
    return different[0] if len(different) == 1 else "rope_parameters.factor"


def betas(config: Config) -> str | None:
    fast, slow = get(config, "rope_parameters.beta_fast", "rope_parameters.beta_slow")
    fast, slow = 32.0 if fast is None else fast, 1.0 if slow is None else slow
    return None if fast > slow else f"it is {fast:g}, and beta_slow is {slow:g}"


def taps_sorted(config: Config) -> str | None:
    ids = config["target_layer_ids"]
    return None if ids == sorted(ids) else f"it is {describe(ids)}"


def taps_distinct(config: Config) -> str | None:
    ids = config["target_layer_ids"]
    doubled = sorted({i for i in ids if ids.count(i) > 1}) if len(ids) <= 1024 else []
    return f"layer {doubled[0]} stands there more than once" if doubled else None


def taps_in_range(config: Config) -> str | None:
    ids, layers = config["target_layer_ids"], config["target_num_hidden_layers"]
    outside = [i for i in ids if i >= layers]
    return f"layer {outside[0]} does not exist in a target of {layers} layers" if outside else None


def taps_counted(config: Config) -> str | None:
    ids, count = config["target_layer_ids"], value_of(config, "num_target_layers")
    return None if len(ids) == count else f"it has {len(ids)} layers, but num_target_layers is {count}"


def kv_heads(config: Config) -> str | None:
    heads, kv = get(config, "num_attention_heads", "num_key_value_heads")
    return None if heads == kv else f"it is {kv}, and num_attention_heads is {heads}"


def even(config: Config) -> str | None:
    width = config["qk_rope_head_dim"]
    return None if width % 2 == 0 else f"it is {width}"


def in_vocabulary(name: str) -> Callable[[Config], str | None]:
    def check(config: Config) -> str | None:
        value, vocabulary = config.get(name), config["vocab_size"]
        outside = [i for i in (value if isinstance(value, list) else [value]) if i is not None and i >= vocabulary]
        return f"it is {outside[0]}, but vocab_size is {vocabulary}" if outside else None

    return check


def mask_is_own(config: Config) -> str | None:
    mask = config["mask_token_id"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        if value is not None and mask in (value if isinstance(value, list) else [value]):
            return f"it is {mask}, the same as {name}"
    return None


def mask_agrees(config: Config) -> str | None:
    inner = (config.get("dflash_config") or {}).get("mask_token_id")
    mask = config["mask_token_id"]
    return None if inner is None or inner == mask else f"it is {mask}, but dflash_config.mask_token_id is {inner}"


def draft_vocabulary(config: Config) -> str | None:
    draft, whole = get(config, "draft_vocab_size", "vocab_size")
    return None if draft <= whole else f"it is {draft}, but vocab_size is {whole}"


def dtype_agrees(config: Config) -> str | None:
    old, new = config.get("torch_dtype"), config.get("dtype")
    return f"it is {old}, but dtype is {new}" if old and new and old != new else None


def off(name: str) -> Callable[[Config], str | None]:
    return lambda config: "it is true" if config.get(name) else None


def shared(config: Config) -> str | None:
    own, target = config["hidden_size"], config["target_hidden_size"]
    return None if own == target else f"hidden_size is {own}, but target_hidden_size is {target}"


def causality_stated(config: Config) -> str | None:
    if config["num_hidden_layers"] == 5 or stated_causality(config) is not None:
        return None
    return "it is not stated; bidirectional is assumed"


PUBLISHED_WINDOW: Final = {
    "rope_parameters.factor": 32.0,
    "rope_parameters.original_max_position_embeddings": 32768,
    "max_position_embeddings": 1048576,
}
