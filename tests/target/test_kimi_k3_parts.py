"""The parts of Kimi K3 against transformers' Kimi-Linear where it has them, and against the formulas where not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDeltaAttention,
    KimiLinearTopkRouter,
)

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape
from k3dspark.target.kimi_k3_kda import DeltaAttention, DeltaState
from k3dspark.target.kimi_k3_loading import unpack_fp4
from k3dspark.target.kimi_k3_mla import LatentAttention
from k3dspark.target.kimi_k3_moe import MixtureOfExperts, Router, situ
from k3dspark.target.kimi_k3_residuals import ResidualMix
from k3dspark.target.kimi_k3_tensors import Tensors
from target.small_k3 import random_tensors, small_shape

KIMI_LINEAR = {
    "mla_use_output_gate": False,
    "linear_attn_config": {"use_full_rank_gate": False, "gate_lower_bound": None},
}
KDA, MLA = "language_model.model.layers.0.self_attn.", "language_model.model.layers.3.self_attn."
MOE = "language_model.model.layers.1.block_sparse_moe."
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def kimi_linear(shape: KimiK3Shape) -> KimiLinearConfig:
    """transformers' config of the same dimensions."""
    return KimiLinearConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        v_head_dim=shape.v_head_dim,
        linear_head_dim=shape.kda_head_dim,
        linear_num_heads=shape.kda_heads,
        linear_conv_kernel_dim=shape.conv_kernel,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        routed_scaling_factor=2.5,
        rms_norm_eps=shape.eps,
        layer_types=["linear_attention"] * shape.layers,
        attn_implementation="eager",
    )


def rows(count: int, width: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def run_kda(layer: DeltaAttention, x: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
    output, changes = layer(x, state, torch.arange(len(x)), (1, len(x)))
    return output, changes.after(state, len(x))


def test_kda_is_transformers_in_one_piece_and_in_two() -> None:
    shape = small_shape(**KIMI_LINEAR)
    tensors = random_tensors(shape)
    theirs = KimiLinearDeltaAttention(kimi_linear(shape), 0).eval()
    state = below(tensors, KDA)
    state["conv1d.weight"] = torch.cat([state.pop(f"{name}_conv1d.weight") for name in "qkv"])
    for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias"):
        state[f"forget_gate.{name}"] = state.pop(name)
    state["forget_gate.A_log"] = state.pop("A_log")[: shape.kda_heads].view(1, 1, -1, 1)
    theirs.load_state_dict(state)
    x = rows(41)
    expected = theirs(x[None])[0]

    layer = DeltaAttention(shape, Tensors(tensors.__getitem__, torch.float32, KDA))
    empty = DeltaState.empty(shape, (1,), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(run_kda(layer, x, empty)[0], expected, **CLOSE)
    first, between = run_kda(layer, x[:23], empty)
    second, _ = run_kda(layer, x[23:], between)
    torch.testing.assert_close(torch.cat([first, second]), expected, **CLOSE)


def test_the_decay_of_kimi_k3_is_bounded_and_its_gate_of_full_rank() -> None:
    shape = small_shape()
    tensors = {name: tensor.double() for name, tensor in below(random_tensors(shape), KDA).items()}
    heads, width = shape.kda_heads, shape.kda_head_dim
    x = rows(19).double()
    mixed = []
    for name in "qkv":
        padded = F.pad(x @ tensors[f"{name}_proj.weight"].T, (0, 0, shape.conv_kernel - 1, 0))
        kernel = tensors[f"{name}_conv1d.weight"][:, 0]
        windows = padded.unfold(0, shape.conv_kernel, 1)  # [T, width, kernel]
        mixed.append(F.silu((windows * kernel).sum(-1)).view(len(x), heads, width))
    q, k, v = mixed
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    raw = (x @ tensors["f_a_proj.weight"].T @ tensors["f_b_proj.weight"].T + tensors["dt_bias"]).view(-1, heads, width)
    decay = (-5 * (tensors["A_log"][:heads, None].exp() * raw).sigmoid()).exp()
    beta = (x @ tensors["b_proj.weight"].T).sigmoid()
    memory = torch.zeros(heads, width, width, dtype=torch.float64)
    outputs = []
    for t in range(len(x)):
        memory = memory * decay[t, :, :, None]
        wrong = v[t] - (memory * k[t, :, :, None]).sum(1)
        memory = memory + beta[t, :, None, None] * k[t, :, :, None] * wrong[:, None]
        outputs.append((memory * q[t, :, :, None]).sum(1) / width**0.5)
    read = torch.stack(outputs)
    normed = read * (read.square().mean(-1, keepdim=True) + shape.eps).rsqrt() * tensors["o_norm.weight"]
    gated = normed.flatten(1) * (x @ tensors["g_proj.weight"].T).sigmoid()

    layer = DeltaAttention(shape, Tensors(tensors.__getitem__, torch.float64))
    empty = DeltaState.empty(shape, (1,), torch.float64, torch.device("cpu"))
    output, after = run_kda(layer, x, empty)
    torch.testing.assert_close(output, gated @ tensors["o_proj.weight"].T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after.memory[0], memory, rtol=1e-9, atol=1e-9)


def latent_attention(shape: KimiK3Shape, tensors: dict[str, Tensor]) -> KimiLinearAttention:
    theirs = KimiLinearAttention(kimi_linear(shape), 3).eval()
    theirs.load_state_dict({name: t for name, t in below(tensors, MLA).items() if name != "g_proj.weight"})
    for norm in (theirs.q_a_layernorm, theirs.kv_a_layernorm):
        norm.variance_epsilon = shape.eps
    return theirs


def causal(count: int) -> Tensor:
    return torch.full((count, count), float("-inf")).triu(1)[None, None]


def test_mla_is_transformers_with_and_without_cached_rows() -> None:
    shape = small_shape(**KIMI_LINEAR)
    tensors = random_tensors(shape)
    x = rows(90)  # more than are attended at once
    expected = latent_attention(shape, tensors)(x[None], causal(90))[0][0]
    layer = LatentAttention(shape, Tensors(tensors.__getitem__, torch.float32, MLA))
    whole, cached = layer(x, [[]], [90])
    torch.testing.assert_close(whole, expected, **CLOSE)
    rest, _ = layer(x[50:], [[cached[:30], cached[30:50]]], [40])
    torch.testing.assert_close(rest, expected[50:], **CLOSE)


def test_the_output_gate_weighs_every_channel_of_every_head_before_the_projection() -> None:
    shape = small_shape()
    tensors = random_tensors(shape)
    theirs = latent_attention(shape, tensors)
    theirs.o_proj = torch.nn.Identity()
    x = rows(12)
    gate = (x @ tensors[MLA + "g_proj.weight"].T).sigmoid()
    expected = (theirs(x[None], causal(12))[0][0] * gate) @ tensors[MLA + "o_proj.weight"].T
    layer = LatentAttention(shape, Tensors(tensors.__getitem__, torch.float32, MLA))
    torch.testing.assert_close(layer(x, [[]], [12])[0], expected, **CLOSE)


def test_the_router_is_transformers_and_its_bias_chooses_without_weighing() -> None:
    shape = small_shape(routed_scaling_factor=2.5)
    tensors = random_tensors(shape)
    tensors[MOE + "gate.e_score_correction_bias"] = torch.tensor([0.4, -0.3, 0.2, -0.4])
    theirs = KimiLinearTopkRouter(kimi_linear(shape))
    theirs.load_state_dict(below(tensors, MOE + "gate."))
    x = rows(200)
    _, weights, experts = theirs(x)
    mine, my_weights = Router(shape, Tensors(tensors.__getitem__, torch.float32, MOE + "gate."))(x)
    order, my_order = experts.argsort(-1), mine.argsort(-1)
    assert torch.equal(experts.gather(-1, order), mine.gather(-1, my_order))
    torch.testing.assert_close(my_weights.gather(-1, my_order), weights.gather(-1, order), **CLOSE)


def test_experts_work_in_the_latent_space_and_their_sum_is_normed_once() -> None:
    shape = small_shape()
    tensors = random_tensors(shape)
    t = below(tensors, MOE)
    x = rows(9)
    layer = MixtureOfExperts(shape, Tensors(tensors.__getitem__, torch.float32, MOE))
    experts, weights = layer.router(x)
    latent = x @ t["routed_expert_down_proj.weight"].T
    mixed = torch.zeros_like(latent)
    for row in range(len(x)):
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            gate, up = (t[f"experts.{expert}.{name}.weight"] @ latent[row] for name in ("w1", "w3"))
            mixed[row] += weight * (t[f"experts.{expert}.w2.weight"] @ formula(gate, up))
    normed = mixed * (mixed.square().mean(-1, keepdim=True) + shape.eps).rsqrt() * t["routed_expert_norm.weight"]
    gate, up = (x @ t[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    shared = formula(gate, up) @ t["shared_experts.down_proj.weight"].T
    assert gate.shape[1] == shape.shared_experts * shape.expert_size
    torch.testing.assert_close(layer(x), normed @ t["routed_expert_up_proj.weight"].T + shared, **CLOSE)


def formula(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def test_situ_is_bounded_where_swiglu_is_not() -> None:
    gate, up = torch.tensor([-100.0, 0.5, 100.0]), torch.tensor([3.0, -2.0, 1000.0])
    torch.testing.assert_close(situ(gate, up, 4.0, 25.0), formula(gate, up))
    assert situ(gate, up, 4.0, 25.0)[2] == 100


def test_residuals_are_weighed_after_the_norm_and_mixed_before_it() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "x_norm.weight": torch.rand(6, generator=generator),
        "x_proj.weight": torch.randn(1, 6, generator=generator),
    }
    values = [10.0**k * rows(3, 6, seed=k) for k in range(3)]
    scores = [
        (v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights["x_norm.weight"]) @ weights["x_proj.weight"][0]
        for v in values
    ]
    share = torch.stack(scores).softmax(0)
    expected = sum(s[:, None] * v for s, v in zip(share, values, strict=True))
    mix = ResidualMix(Tensors(weights.__getitem__, torch.float32), "x", 1e-5)
    torch.testing.assert_close(mix(values[2], values[:2]), expected)


def test_fp4_numbers_are_read_lower_half_first_with_a_power_of_two_for_each_group_of_32() -> None:
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16], packed[1, 31] = 0x2F, 0x71, 0x80  # (-6, 1), (0.5, 6), (0, -0)
    scales = torch.tensor([[127, 130], [120, 127]], dtype=torch.uint8)
    matrix = unpack_fp4(packed, scales)
    assert matrix.shape == (2, 64)
    assert matrix[0, :2].tolist() == [-6, 1]
    assert matrix[0, 32:34].tolist() == [4, 48]
    assert not matrix[0, 2:32].any()
    assert not matrix[1].any()
    with pytest.raises(ValueError, match="NaN"):
        unpack_fp4(packed, torch.full_like(scales, 255))
