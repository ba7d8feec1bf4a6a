"""When config and weights disagree: the one config field that, changed, would make them agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from k3dspark.checkpoint.fields import BY_NAME, value_of
from k3dspark.checkpoint.inventory import DTYPES, Sizes, expected_tensors

# (shape, dtype) by canonical name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]

_SWITCHES: Final[Mapping[str, tuple[Any, ...]]] = {
    "torch_dtype": tuple(DTYPES),
    "fc_norm": (True, False),
    "enable_confidence_head": (True, False),
    "confidence_head_with_markov": (True, False),
    "share_target_embeddings": (True, False),
    "markov_head_type": ("vanilla", "gated", "rnn"),
}


def repair(config: Mapping[str, Any], found: Shapes) -> tuple[str, Any] | None:
    """(field, value) such that `config` with that value asks for exactly the tensors `found`; None if no field does."""
    for name, value in _candidates(config, found):
        if _asks_for(_with(config, name, value), found):
            return name, value
    return None


def _with(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    changed = {**config, name: value}
    if name == "vocab_size" and value_of(config, "draft_vocab_size") == config["vocab_size"]:
        changed["draft_vocab_size"] = value  # one size stated twice
    return changed


def _asks_for(config: Mapping[str, Any], found: Shapes) -> bool:
    specs = expected_tensors(config)
    return specs.keys() == found.keys() and all(found[name] == (spec.shape, spec.dtype) for name, spec in specs.items())


def _candidates(config: Mapping[str, Any], found: Shapes) -> Iterator[tuple[str, Any]]:
    yield "draft_vocab_size", config["vocab_size"]
    for name, values in _SWITCHES.items():
        yield from ((name, value) for value in values if value != value_of(config, name))
    layers = {int(part) for name in found if name.startswith("layers.") and (part := name.split(".")[1]).isdecimal()}
    if layers and max(layers) < 1024:
        yield "num_hidden_layers", max(layers) + 1
    seen: set[tuple[str, int]] = set()
    for tensor, spec in expected_tensors(config).items():
        if tensor not in found or len(found[tensor][0]) != len(spec.shape):
            continue
        for term, wanted, size in zip(spec.terms, spec.shape, found[tensor][0], strict=True):
            if size == wanted:
                continue
            for name, value in _solutions(config, term, size):
                if (name, value) not in seen:
                    seen.add((name, value))
                    yield name, value


def _solutions(config: Mapping[str, Any], term: str, size: int) -> Iterator[tuple[str, int]]:
    """Fields of a term, each with the value that alone makes the term equal `size`. Terms are affine in each field."""
    for name in BY_NAME:
        if name not in term.replace("+", "*").split("*"):
            continue
        at_zero, at_one = (Sizes({**config, name: value})(term) for value in (0, 1))
        slope = at_one - at_zero
        if slope and (size - at_zero) % slope == 0:
            value = (size - at_zero) // slope
            if BY_NAME[name].low <= value <= BY_NAME[name].high:
                yield name, value
