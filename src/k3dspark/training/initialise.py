"""A new draft for a target: sizes, draft vocabulary, and the starting values (spec §J.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.training.teacher import DenseMlp, Donor


def draft_vocabulary(counts: Tensor, size: int, always: list[int]) -> Tensor:
    """The `size` most frequent answer tokens (ids [size], ascending), `always` included (stop tokens)."""
    # Ties go to the smaller id: byte-pair vocabularies are roughly sorted by frequency.
    ranked = counts * counts.shape[0] - torch.arange(counts.shape[0])
    ranked[torch.tensor(always, dtype=torch.long)] = ranked.max() + 1
    return ranked.topk(size).indices.sort().values


def initialise(
    config: K3DSparkConfig, target: Donor, vocabulary: Tensor | None, taps: Tensor, seed: int
) -> K3DSparkModel:
    """A draft that starts out reading the newest context row; everything else is small or random.

    taps [T, N·d] are sample rows of the target, already multiplied by `tap_scale`. The embedding and the head are the
    target's, frozen. W2 starts as zero (the first step equals the parallel drafter), the confidence head as c = ½.
    Where widths agree, context_proj starts as "the last tap", the MLPs as the target's last ones, and the first
    attention copies the context row at distance 1: found from scratch, that takes most of a short training.
    """
    generator = torch.Generator().manual_seed(seed)
    head = target.head if vocabulary is None else target.head[vocabulary]
    model = K3DSparkModel(config, lm_head=head.clone())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)
        model.embed_tokens.weight.copy_(target.embed)
        model.embed_tokens.weight.requires_grad_(False)
        size = 0.5  # of what a branch adds; much smaller, and Adam's fixed step is too coarse for it
        for layer in model.stack:
            layer.self_attn.o_proj.weight.mul_(size)
            layer.mlp.down_proj.weight.mul_(size)
        model.markov_head.markov_w1.weight.normal_(0, 0.02, generator=generator)
        model.markov_head.markov_w2.weight.zero_()
        if model.confidence_head is not None:
            model.confidence_head.proj.weight.zero_()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        if vocabulary is not None:
            model.d2t = vocabulary.clone()
        d = config.hidden_size
        if d == target.embed.shape[1] == config.target_hidden_size:
            model.context_proj.weight.mul_(0.1 / len(config.target_layer_ids))
            model.context_proj.weight[:, -d:] += torch.eye(d)
            # Begin unsure: at full size, random logits cost a cross-entropy of 20.
            model.final_norm.weight.copy_(0.2 * target.final_norm)
            features = model.context_features(taps)
            mlps = target.mlps[-len(model.stack) :]
            if mlps and config.intermediate_size == mlps[0].down.shape[1]:
                _copy_mlps(model, mlps, size)
            _read_newest_row(model, features, gain=1.0)
    return model


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return x.float().square().mean(-1).sqrt()


def tap_scale(taps: Tensor) -> Tensor:
    """1 / rms of each column [N·d] of sample taps [T, N·d].

    A few dimensions of a residual stream are hundreds of times larger than the rest and nearly constant; unscaled,
    they are most of what an optimiser with equal steps for all weights would see. Training multiplies taps by this;
    `export` folds it into context_proj.
    """
    return taps.float().square().mean(0).sqrt().clamp(min=1e-4).reciprocal()


def _copy_mlps(model: K3DSparkModel, mlps: tuple[DenseMlp, ...], size: float) -> None:
    """The target's last MLPs, their output scaled to rms `size` on unit input."""
    probe = torch.randn(256, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer, source in zip(model.stack, mlps, strict=True):
        gate, up = source.gate_up.chunk(2)
        layer.mlp.gate_proj.weight.copy_(gate)
        layer.mlp.up_proj.weight.copy_(up)
        layer.mlp.down_proj.weight.copy_(source.down)
        layer.post_attention_layernorm.weight.copy_(source.norm)
        output = layer.mlp(layer.post_attention_layernorm(probe))
        layer.mlp.down_proj.weight.mul_(size / float(rms(output).median()))


def _read_newest_row(model: K3DSparkModel, features: Tensor, gain: float) -> None:
    """Make the first layer's attention return about gain · c of the position before.

    Values: the latent holds the leading directions of c, the heads put them back. Keys and queries: a constant on the
    fastest rotary pairs (read off the mean of c and of the embeddings), turned back by one position in the query.
    """
    config, attention = model.config, model.stack[0].self_attn
    d, rank, nope, rope = config.hidden_size, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    width = config.num_attention_heads * config.v_head_dim
    if width > d or rank > d or rope < 8:
        return
    _, _, directions = torch.linalg.svd(features, full_matrices=False)
    basis = directions[:rank].T  # [d, rank]
    attention.kv_a_proj_with_mqa.weight[:rank] = basis.T
    up = attention.kv_b_proj.weight.view(config.num_attention_heads, nope + config.v_head_dim, rank)
    up[:, nope:] = basis[:width].view(config.num_attention_heads, config.v_head_dim, rank)
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:width] = torch.eye(width) * gain * (d / rank) ** 0.5

    pairs, strength = 4, 6.0
    mean_row = features.mean(0)
    key_rows = attention.kv_a_proj_with_mqa.weight[rank:]
    key_rows.mul_(0.1)
    key_rows[0 : 2 * pairs : 2] = strength * mean_row / mean_row.square().sum()
    normed = model.stack[0].input_layernorm(model.embed_tokens.weight)
    mean_input = normed.mean(0)
    attention.q_a_proj.weight[0] = 16 * mean_input / mean_input.square().sum()
    # After its norm that entry is about 16 / sqrt(1 + 16² / r).
    level = 16 / (1 + 256 / config.q_lora_rank) ** 0.5
    angle = -model.rope.frequencies[:pairs].float()
    query = attention.q_b_proj.weight.view(config.num_attention_heads, nope + rope, config.q_lora_rank)
    query[:, nope : nope + 2 * pairs : 2, 0] = strength / level * angle.cos()
    query[:, nope + 1 : nope + 1 + 2 * pairs : 2, 0] = strength / level * angle.sin()
