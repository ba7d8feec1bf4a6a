"""Faults planted in a copy of a draft directory, each the way a user would really have it wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diagnosis.small_pair import change_config, change_rope, change_tensors
from k3dspark.diagnosis.changes import W1, W2, turned_queries
from k3dspark.diagnosis.wiring import Wiring
from k3dspark.model.config import K3DSparkConfig

Plant = Callable[[Path, Wiring], None]
"""Breaks the draft in a directory; the wiring is that of the healthy one."""


def _taps(step: int) -> Plant:
    def plant(draft: Path, healthy: Wiring) -> None:
        change_config(draft, target_layer_ids=[tap.layer + step for tap in healthy.taps])

    return plant


def _order(draft: Path, healthy: Wiring) -> None:
    """An engine that hands over two taps in the other order."""

    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = list(tensors["context_proj.weight"].chunk(len(healthy.taps), -1))
        parts[1], parts[2] = parts[2], parts[1]
        return {"context_proj.weight": torch.cat(parts, -1)}

    change_tensors(draft, swap)


def _positions(step: int) -> Plant:
    """A kernel that counts the block from one position further on (or back)."""

    def plant(draft: Path, healthy: Wiring) -> None:
        turned = turned_queries(healthy, step).tensors
        change_tensors(draft, lambda _: {n: t.float() for n, t in turned.items() if n.endswith("q_b_proj.weight")})

    return plant


def _no_yarn(draft: Path, healthy: Wiring) -> None:
    change_config(draft, rope_parameters={"rope_type": "default", "rope_theta": healthy.config.rope_theta})


def _lost_scale(draft: Path, healthy: Wiring) -> None:
    change_rope(draft, mscale_all_dim=0.0)


def _layout(draft: Path, healthy: Wiring) -> None:
    """Weights rewritten for kernels that rotate halves."""
    config = healthy.config
    width, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
    order = [*range(0, width, 2), *range(1, width, 2)]

    def rewrite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for name, tensor in tensors.items():
            if name.endswith("q_b_proj.weight"):
                heads = tensor.unflatten(0, (config.num_attention_heads, -1))
                changed[name] = torch.cat([heads[:, :nope], heads[:, nope:][:, order]], 1).flatten(0, 1)
            if name.endswith("kv_a_proj_with_mqa.weight"):
                changed[name] = torch.cat([tensor[:-width], tensor[-width:][order]])
        return changed

    change_tensors(draft, rewrite)


def _theta(draft: Path, healthy: Wiring) -> None:
    theta = 500000.0
    change_config(draft, rope_theta=theta)
    change_rope(draft, rope_theta=theta)


def _foreign_markov(draft: Path, healthy: Wiring) -> None:
    """A Markov head of another draft: its rows mean other tokens."""
    order = torch.randperm(healthy.tensors[W2].shape[0], generator=torch.Generator().manual_seed(0))
    change_tensors(draft, lambda tensors: {W2: tensors[W2][order]})


def _transposed_markov(draft: Path, healthy: Wiring) -> None:
    def exchange(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first, second, ids = tensors[W1], tensors[W2], tensors.get("d2t")
        if ids is None:
            return {W1: second, W2: first}
        wide = torch.zeros_like(first)
        wide[ids] = second
        return {W1: wide, W2: first[ids]}

    change_tensors(draft, exchange)


def _causal(draft: Path, healthy: Wiring) -> None:
    change_config(draft, block_causal=not healthy.config.block_causal)


def _own_embeddings(draft: Path, healthy: Wiring, embed: Tensor | None, head: Tensor | None) -> None:
    """Files with the draft's own embedding and output layer, as published drafts have them."""
    full = healthy.tensors["embed_tokens.weight"]
    dtype = getattr(torch, str(K3DSparkConfig.from_file(draft).torch_dtype).removeprefix("torch."))
    change_config(draft, share_target_embeddings=False)
    change_tensors(draft, lambda _: {"embed_tokens.weight": full if embed is None else embed})
    stored = full if head is None else head
    save_file({"lm_head.weight": stored.to(dtype).contiguous()}, draft / "lm_head.safetensors")


def _embedding(draft: Path, healthy: Wiring) -> None:
    """An embedding whose tokenizer had one special token less at the front."""
    _own_embeddings(draft, healthy, healthy.tensors["embed_tokens.weight"].roll(1, 0), None)


def _lm_head(draft: Path, healthy: Wiring) -> None:
    """An output layer of a much finer-tuned sibling, here the right one with noise of half its size."""
    head = healthy.tensors["embed_tokens.weight"].float()  # the targets here tie the two
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    _own_embeddings(draft, healthy, None, head + 0.5 * head.std() * noise)


def _mask(token: int) -> Plant:
    def plant(draft: Path, healthy: Wiring) -> None:
        change_config(draft, mask_token_id=token)

    return plant


def planted(mask: int) -> dict[str, Plant]:
    """Every fault by the change that undoes it; `mask` is a token that was not the mask in training."""
    return {
        "taps_early": _taps(-1),
        "taps_late": _taps(+1),
        "tap_order": _order,
        "positions_low": _positions(-1),
        "positions_high": _positions(+1),
        "yarn_missing": _no_yarn,
        "yarn_scale": _lost_scale,
        "rope_layout": _layout,
        "rope_theta": _theta,
        "markov_wrong": _foreign_markov,
        "markov_transposed": _transposed_markov,
        "block_mask": _causal,
        "embedding": _embedding,
        "lm_head": _lm_head,
        "mask_token": _mask(mask),
    }
