"""How a transformers cache returns to an earlier length, for every kind of layer it is made of.

Attention layers are cut. Windows are put back by reference: transformers replaces their tensors, it never writes into
them. Recurrent and convolution states are overwritten in place, so they are copied before the rows run. Nothing is
assumed about a layer class that is not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


class Rollback(Enum):
    """How a sequence returns to an earlier length."""

    CROP = "crop"  # every layer holds one row per token, as far back as it will be needed: cut the rejected rows off
    REPLAY = "replay"  # recurrent states: put the state before the rows back, run the kept rows again
    SNAPSHOT = "snapshot"  # recurrent states of a model that takes one row at a time: a copy after every row
    RECOMPUTE = "recompute"  # state that this adapter cannot reach: run the whole sequence every time


@dataclass(frozen=True)
class Saved:
    """One layer at one length: attributes to put back, and what cuts the rows that were appended since."""

    attributes: dict[str, Any]
    cut: Callable[[Any, int], None] | None = None


KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
WINDOW = ("keys", "values", "cumulative_length", "is_initialized")
STATES = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
)


def understands(cache: Cache) -> bool:
    """Whether `save` and `restore` know every layer of this cache."""
    return all(type(layer) in KNOWN for layer in cache.layers)


def save(cache: Cache) -> list[Saved]:
    """The cache as it is now, for one `restore`. Attention rows are not copied."""
    return [_save(layer) for layer in cache.layers]


def restore(cache: Cache, saved: Sequence[Saved], rows: int) -> None:
    """Put back what `save` saw, `rows` rows ago. The saved tensors go back into use: restore from them only once."""
    for layer, before in zip(cache.layers, saved, strict=True):
        if before.cut is not None and rows:
            before.cut(layer, -rows)
        vars(layer).update(before.attributes)


def crop(cache: Cache, rows: int) -> None:
    """Cut the last `rows` rows off; also when 0, for then a window drops what it no longer needs."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if not (isinstance(layer, DynamicLayer) and not layer.is_initialized):  # nothing was ever written to it
            layer.crop(-rows)


def can_crop(cache: Cache) -> bool:
    """Whether every layer of this cache, which must have seen a token, can be cut.

    A convolution keeps its last inputs and can be cut; a layer that also holds a recurrent state cannot.
    """
    attention = (DynamicLayer, DynamicIndexedLayer, DynamicSlidingWindowLayer, DummyLayer)
    return all(
        type(layer) in attention or (type(layer) is LinearAttentionLayer and layer.is_croppable)
        for layer in cache.layers
    )


def first_state(cache: Cache) -> torch.Tensor | None:
    """The recurrent state of the first layer that has one."""
    for layer in cache.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                return state
    return None


def _save(layer: Any) -> Saved:
    kind = type(layer)
    if kind in (DynamicLayer, DynamicIndexedLayer):
        return Saved({}, kind.crop)
    if kind is DynamicSlidingWindowLayer:
        return Saved(_window(layer))
    if kind is LinearAttentionLayer:
        return Saved(_states(layer))
    if kind is LinearAttentionAndFullAttentionLayer:
        return Saved(_states(layer), DynamicLayer.crop)
    if kind is LinearAttentionAndSlidingWindowAttentionLayer:
        return Saved(_states(layer) | _window(layer))
    return Saved({})  # a dummy holds nothing


def _window(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in WINDOW}


def _states(layer: Any) -> dict[str, Any]:
    copied = {name: dict(getattr(layer, name)) for name in STATES}
    for name in ("conv_states", "recurrent_states"):
        copied[name] = {i: None if state is None else state.clone() for i, state in copied[name].items()}
    return copied
