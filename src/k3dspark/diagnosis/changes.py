"""What is changed, one thing at a time: each change undoes one known fault.

A change gives the wirings that undo it, or says in one word of `wording_*.NOT_TRIED` why there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor

from k3dspark.checkpoint.fields import rope_parameters
from k3dspark.diagnosis.subject import Subject
from k3dspark.diagnosis.wiring import Tap, Wiring
from k3dspark.model.rope import Rope

# Mask tokens of published drafts for Kimi K3 (spec §H.2).
KNOWN_MASKS: Final = (163837, 163824, 163605, 163608)
MOST_MASKS: Final = 24
LEAST_ORIGINAL: Final = 64  # tokens before YaRN
USUAL_THETAS: Final = (10000.0, 50000.0, 100000.0, 500000.0, 1000000.0)


@dataclass(frozen=True)
class Candidate:
    """One wiring to try. `detail` says what it has, in the words of config.json: no language."""

    change: str
    detail: str
    wiring: Wiring


class NotApplicable(Exception):
    """Why a change cannot be tried on this pair."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def candidates(subject: Subject, only: Sequence[str] | None = None) -> tuple[list[Candidate], dict[str, str]]:
    """Everything that can be tried on this pair, and the changes that cannot, with the reason; or `only` some."""
    found: list[Candidate] = []
    refused: dict[str, str] = {}
    for change, variants in CHANGES.items():
        if only is not None and change not in only:
            continue
        try:
            tried = [Candidate(change, detail, wiring) for detail, wiring in variants(subject)]
        except NotApplicable as no:
            refused[change] = no.reason
            continue
        found += tried
        if not tried:
            refused[change] = "nothing_else"
    return found, refused


Variants = Iterator[tuple[str, Wiring]]


# -- taps ------------------------------------------------------------------------------------------------------------


def _shifted(step: int) -> Callable[[Subject], Variants]:
    def variants(subject: Subject) -> Variants:
        wiring = subject.wiring
        taps = [Tap(tap.layer + step, tap.stream) for tap in wiring.taps]
        if any(tap.layer not in subject.recorder.layers for tap in taps):
            raise NotApplicable("no_such_layer")
        yield _layers(taps), wiring.with_taps(taps)

    return variants


def _one_tap(subject: Subject) -> Variants:
    wiring = subject.wiring
    for index, tap in enumerate(wiring.taps):
        for step in (-1, 1):
            moved = Tap(tap.layer + step, tap.stream)
            if moved.layer in subject.recorder.layers and moved not in wiring.taps:
                taps = [*wiring.taps[:index], moved, *wiring.taps[index + 1 :]]
                yield _layers(taps), wiring.with_taps(taps)


def _tap_order(subject: Subject) -> Variants:
    taps, count = list(subject.wiring.taps), len(subject.wiring.taps)
    if count < 2:
        raise NotApplicable("one_tap")
    orders = [taps[::-1], *(taps[turn:] + taps[:turn] for turn in range(1, count))]
    for left, right in combinations(range(count), 2):
        order = taps.copy()
        order[left], order[right] = order[right], order[left]
        orders.append(order)
    for distinct in dict.fromkeys(tuple(order) for order in orders):
        yield _layers(distinct), subject.wiring.with_taps(distinct)


def _tap_stream(subject: Subject) -> Variants:
    others = [stream for stream in subject.recorder.streams if stream != subject.wiring.taps[0].stream]
    if not others:
        raise NotApplicable("one_stream")
    for stream in others:
        taps = [Tap(tap.layer, stream) for tap in subject.wiring.taps]
        yield f"aux_hidden_stream {stream}", subject.wiring.with_taps(taps)


def _layers(taps: Any) -> str:
    return f"layers {[tap.layer for tap in taps]}"


# -- positions -------------------------------------------------------------------------------------------------------


def _moved(step: int) -> Callable[[Subject], Variants]:
    def variants(subject: Subject) -> Variants:
        wiring = subject.wiring
        yield f"block positions {step:+d}", replace(wiring, block_offset=wiring.block_offset + step)
        yield f"query positions {step:+d}", turned_queries(wiring, step)

    return variants


def turned_queries(wiring: Wiring, step: float) -> Wiring:
    """The rotated part of every query turned by `step` positions: q_b as if the block stood further on."""
    config = wiring.config
    rope = Rope.from_parameters(config.qk_rope_head_dim, config.rope_parameters)
    angle = rope.frequencies * step
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    nope = config.qk_nope_head_dim

    def turn(weight: Tensor) -> Tensor:
        heads = weight.double().unflatten(0, (config.num_attention_heads, -1)).clone()
        pairs = heads[:, nope:].unflatten(1, (-1, 2))
        even, odd = pairs[:, :, 0], pairs[:, :, 1]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), 2).flatten(1, 2)
        return torch.cat([heads[:, :nope], turned], 1).flatten(0, 1).to(weight.dtype)

    return _rotary(wiring, turn)


# -- rotation --------------------------------------------------------------------------------------------------------


def _yarn_missing(subject: Subject) -> Variants:
    """YaRN where the config has none: the window says how much longer it is than some usual original length."""
    rope = rope_parameters(subject.wiring.mapping)
    if rope["rope_type"] == "yarn":
        raise NotApplicable("has_yarn")
    window = subject.wiring.config.max_position_embeddings
    for factor in (2, 4, 8, 16, 32):
        if window % factor == 0 and window // factor >= LEAST_ORIGINAL:
            changed = {
                "rope_type": "yarn", "rope_theta": rope["rope_theta"], "factor": float(factor),
                "original_max_position_embeddings": window // factor, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            }  # fmt: skip
            yield f"rope_type yarn, factor {factor}", subject.wiring.with_rope(changed)


def _yarn_surplus(subject: Subject) -> Variants:
    rope = rope_parameters(subject.wiring.mapping)
    if rope["rope_type"] != "yarn":
        raise NotApplicable("no_yarn")
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    yield "rope_type default", subject.wiring.with_rope(plain)


def _yarn_scale(subject: Subject) -> Variants:
    rope = rope_parameters(subject.wiring.mapping)
    if rope["rope_type"] != "yarn":
        raise NotApplicable("no_yarn")
    for scale in (1.0, 0.0):
        if rope["mscale_all_dim"] != scale or rope["mscale"] != 1.0:
            yield (
                f"mscale 1.0, mscale_all_dim {scale}",
                subject.wiring.with_rope({**rope, "mscale": 1.0, "mscale_all_dim": scale}),
            )


def _rope_layout(subject: Subject) -> Variants:
    width = subject.wiring.config.qk_rope_head_dim
    halves = [*range(0, width, 2), *range(1, width, 2)]
    for detail, order in (("half-split rows", _inverse(halves)), ("interleaved rows converted twice", halves)):
        yield detail, _rotary(subject.wiring, _reordered_heads(subject.wiring, order), _reordered_tail(order))


def _rope_theta(subject: Subject) -> Variants:
    rope = rope_parameters(subject.wiring.mapping)
    usual = [*([subject.target_theta] if subject.target_theta else []), *USUAL_THETAS]
    for theta in dict.fromkeys(usual):
        if theta != rope["rope_theta"]:
            yield f"rope_theta {theta:g}", subject.wiring.with_rope({**rope, "rope_theta": theta})


def _rotary(
    wiring: Wiring, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor] | None = None
) -> Wiring:
    """With the rows of every layer's q_b (and kv_a) mapped."""
    changed = {}
    for layer in range(wiring.config.num_hidden_layers):
        for name, change in (("q_b_proj", queries), ("kv_a_proj_with_mqa", keys)):
            if change is not None:
                full = f"layers.{layer}.self_attn.{name}.weight"
                changed[full] = change(wiring.tensors[full])
    return wiring.with_tensors(changed)


def _reordered_heads(wiring: Wiring, order: list[int]) -> Callable[[Tensor], Tensor]:
    config = wiring.config
    nope, heads = config.qk_nope_head_dim, config.num_attention_heads

    def change(weight: Tensor) -> Tensor:
        split = weight.unflatten(0, (heads, -1))
        return torch.cat([split[:, :nope], split[:, nope:][:, order]], 1).flatten(0, 1)

    return change


def _reordered_tail(order: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda weight: torch.cat([weight[: -len(order)], weight[-len(order) :][order]])


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


# -- heads and embeddings --------------------------------------------------------------------------------------------

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def _markov_off(subject: Subject) -> Variants:
    tensors = subject.wiring.tensors
    if not bool(tensors[W2].any()):
        raise NotApplicable("markov_is_zero")
    yield "markov_w2 0", subject.wiring.with_tensors({W2: torch.zeros_like(tensors[W2])})


def _markov_transposed(subject: Subject) -> Variants:
    """W1 and W2 exchanged, over the draft's vocabulary: tokens outside it have no row in W2 to take."""
    tensors = subject.wiring.tensors
    first, second, ids = tensors[W1], tensors[W2], tensors.get("d2t")
    if ids is None:
        yield "markov_w1 and markov_w2 exchanged", subject.wiring.with_tensors({W1: second, W2: first})
        return
    swapped = torch.zeros_like(first)
    swapped[ids] = second
    yield "markov_w1 and markov_w2 exchanged", subject.wiring.with_tensors({W1: swapped, W2: first[ids]})


def _causality(subject: Subject) -> Variants:
    causal = not subject.wiring.config.block_causal
    yield f"block_causal {str(causal).lower()}", subject.wiring.with_config(block_causal=causal)


def _lm_head(subject: Subject) -> Variants:
    wiring, ids = subject.wiring, subject.wiring.tensors.get("d2t")
    head = subject.target_head if ids is None else subject.target_head[ids]
    if head.shape != wiring.head.shape:
        raise NotApplicable("other_width")
    head = head.to(wiring.head.dtype)
    if torch.equal(head, wiring.head):
        raise NotApplicable("is_the_targets")
    yield "the target's lm_head", replace(wiring, head=head)


def _embedding(subject: Subject) -> Variants:
    name = "embed_tokens.weight"
    own = subject.wiring.tensors[name]
    if subject.target_embed.shape != own.shape:
        raise NotApplicable("other_width")
    embed = subject.target_embed.to(own.dtype)
    if torch.equal(own, embed):
        raise NotApplicable("is_the_targets")
    yield "the target's embed_tokens", subject.wiring.with_tensors({name: embed})


def _mask_token(subject: Subject) -> Variants:
    config, embed = subject.wiring.config, subject.wiring.tensors["embed_tokens.weight"]
    special = subject.special_ids
    if len(special) > MOST_MASKS:
        special = special[-MOST_MASKS:]  # reserved ids usually end the vocabulary
    tried = [embed[config.mask_token_id]]
    for token in dict.fromkeys((*KNOWN_MASKS, config.mask_token_id - 1, config.mask_token_id + 1, *reversed(special))):
        if 0 <= token < config.vocab_size and not any(torch.equal(embed[token], row) for row in tried):
            tried.append(embed[token])
            yield f"mask_token_id {token}", subject.wiring.with_config(mask_token_id=token)


def _dtype(subject: Subject) -> Variants:
    if subject.wide is None:
        raise NotApplicable("is_fp32")
    yield "float32", subject.wide()


CHANGES: Final[Mapping[str, Callable[[Subject], Variants]]] = {
    "taps_early": _shifted(+1),
    "taps_late": _shifted(-1),
    "one_tap": _one_tap,
    "tap_order": _tap_order,
    "tap_stream": _tap_stream,
    "positions_low": _moved(+1),
    "positions_high": _moved(-1),
    "yarn_missing": _yarn_missing,
    "yarn_surplus": _yarn_surplus,
    "yarn_scale": _yarn_scale,
    "rope_layout": _rope_layout,
    "rope_theta": _rope_theta,
    "markov_wrong": _markov_off,
    "markov_transposed": _markov_transposed,
    "block_mask": _causality,
    "lm_head": _lm_head,
    "embedding": _embedding,
    "mask_token": _mask_token,
    "dtype": _dtype,
}
