"""The draft written a second time, as the formulas of spec §A–C, one sequence at a time; for comparison only."""

from __future__ import annotations

import torch
from torch import Tensor

from k3dspark.model.draft import K3DSparkModel


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, ..., r] as complex numbers x_2i + i·x_2i+1 times e^{i m ω}."""
    angle = positions.to(x.dtype)[:, None] * frequencies.to(x.dtype)
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.view(len(positions), *([1] * (x.dim() - 2)), -1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def rows(model: K3DSparkModel, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    attention = model.layers[layer].self_attn
    c = model.config
    a, b = (x @ attention.kv_a_proj_with_mqa.weight.T).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    latent = norm(a, attention.kv_a_layernorm.weight, c.rms_norm_eps)
    return torch.cat([latent, rotate(b, positions, model.rope.frequencies)], -1)


def context(model: K3DSparkModel, taps: Tensor) -> list[Tensor]:
    """Per layer the rows [T, W] of taps [T, N·d] at positions 0 … T−1."""
    c = norm(taps @ model.context_proj.weight.T, model.context_norm.weight, model.config.rms_norm_eps)
    return [rows(model, layer, c, torch.arange(len(taps))) for layer in range(len(model.layers))]


def block_hidden(model: K3DSparkModel, taps: Tensor, anchor: int) -> Tensor:
    """Final-normed hidden [K, d] of the block at position len(taps), heads expanded."""
    c, n = model.config, len(taps)
    ids = torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))
    positions = torch.arange(n, n + c.block_size)
    h = model.embed_tokens.weight[ids]
    for index, past in enumerate(context(model, taps)):
        layer = model.layers[index]
        a = layer.self_attn
        z = norm(h, layer.input_layernorm.weight, c.rms_norm_eps)
        q = norm(z @ a.q_a_proj.weight.T, a.q_a_layernorm.weight, c.rms_norm_eps) @ a.q_b_proj.weight.T
        own = rows(model, index, z, positions)
        heads = []
        width = c.qk_nope_head_dim + c.qk_rope_head_dim
        up_width = c.qk_nope_head_dim + c.v_head_dim
        for head in range(c.num_attention_heads):
            q_h = q[:, head * width : (head + 1) * width]
            up = a.kv_b_proj.weight[head * up_width : (head + 1) * up_width]
            q_rope = rotate(q_h[:, c.qk_nope_head_dim :], positions, model.rope.frequencies)
            out = []
            for k in range(c.block_size):
                visible = torch.cat([past, own[: k + 1] if c.block_causal else own])
                latent, key_rope = visible.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
                key = latent @ up[: c.qk_nope_head_dim].T
                value = latent @ up[c.qk_nope_head_dim :].T
                score = c.softmax_scale * (key @ q_h[k, : c.qk_nope_head_dim] + key_rope @ q_rope[k])
                out.append(score.softmax(0) @ value)
            heads.append(torch.stack(out))
        h = h + torch.cat(heads, -1) @ a.o_proj.weight.T
        z = norm(h, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        gate, up_value = z @ layer.mlp.gate_proj.weight.T, z @ layer.mlp.up_proj.weight.T
        h = h + (gate * torch.sigmoid(gate) * up_value) @ layer.mlp.down_proj.weight.T
    return norm(h, model.final_norm.weight, c.rms_norm_eps)


def greedy(model: K3DSparkModel, hidden: Tensor, anchor: int) -> tuple[list[int], list[float]]:
    """Tokens and confidence logits of the vanilla Markov loop."""
    assert model.lm_head is not None
    assert model.confidence_head is not None
    tokens, confidence, previous = [], [], anchor
    for h in hidden:
        e = model.markov_head.markov_w1.weight[previous]
        proj = model.confidence_head.proj
        confidence.append(float(proj.weight[0] @ torch.cat([h, e]) + proj.bias[0]))
        logits = model.lm_head @ h + model.markov_head.markov_w2.weight @ e
        column = int(logits.argmax())
        previous = column if model.d2t is None else int(model.d2t[column])
        tokens.append(previous)
    return tokens, confidence
