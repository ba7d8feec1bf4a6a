"""One Llama-family decoder layer, its weights laid out so that every row gets the same bits wherever it stands.

A CPU kernel may treat a row differently by its alignment in memory, or by whether it falls to the vector or to the
scalar end of a loop. So heads are padded to whole vectors, and large elementwise calls are made row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3dspark.model.packed import PackedLinear, can_widen, narrowest
from k3dspark.target.weights import LlamaLayer, LlamaShape

# Two AVX-512 registers of complex numbers: no head ends in scalar code, every row starts on a cache line.
HEAD_STEP = 32
# From this size on elementwise CPU kernels split work between threads, anywhere in a row.
GRAIN = 32768


def padded_head(head_dim: int) -> int:
    """The width in which a head is computed; the columns beyond `head_dim` are zero."""
    return -(-head_dim // HEAD_STEP) * HEAD_STEP


class PackedLayer:
    """Projections and norms of a layer, ready to run.

    Invisible outside: the factors of both RMSNorms are multiplied into the matrices behind them, unless that would
    make numbers of 16 bits wider; rotary pairs
    (i, i + head_dim / 2) become neighbours, so that the rotation is one complex product; heads are padded; the heads
    that `out` reads are in the order attention leaves them, (group, kv_head).
    """

    def __init__(self, layer: LlamaLayer, shape: LlamaShape, tile_rows: int, prepack: bool, int8: bool = False) -> None:
        d, head_dim, kv_heads = shape.hidden_size, shape.head_dim, shape.kv_heads
        spare = padded_head(head_dim) - head_dim
        pair = torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)  # [0, head_dim / 2, 1, …]

        def per_head(tensor: torch.Tensor) -> torch.Tensor:
            heads = tensor.view(shape.heads + 2 * kv_heads, head_dim, -1)
            rotary = shape.heads + kv_heads
            return F.pad(torch.cat([heads[:rotary, pair], heads[rotary:]]), (0, 0, 0, spare))

        width = d**0.5
        bias = per_head(layer.qkv_bias).reshape(-1) if layer.qkv_bias is not None else None
        gains = [norm.float() * width for norm in (layer.input_norm, layer.post_norm)]
        narrow = prepack and can_widen(layer.qkv) and narrowest(layer.qkv).dtype == torch.bfloat16
        self.gains = gains if narrow and not int8 else None  # None: multiplied in
        qkv, gate_up = layer.qkv, layer.gate_up
        if self.gains is None:
            qkv, gate_up = qkv * gains[0].to(qkv.dtype), gate_up * gains[1].to(gate_up.dtype)
        self.qkv = PackedLinear(per_head(qkv).reshape(-1, d), bias, tile_rows, prepack, int8)
        columns = F.pad(layer.out.view(d, kv_heads, -1, head_dim), (0, spare)).transpose(1, 2).reshape(d, -1)
        self.out = PackedLinear(columns, layer.out_bias, tile_rows, prepack, int8)
        self.gate_up = PackedLinear(gate_up, None, tile_rows, prepack, int8)
        self.down = PackedLinear(layer.down, None, tile_rows, prepack, int8)
        eps = shape.rms_norm_eps
        self.q_norm = RmsNorm(layer.q_norm.float()[pair], eps, spare) if layer.q_norm is not None else None
        self.k_norm = RmsNorm(layer.k_norm.float()[pair], eps, spare) if layer.k_norm is not None else None

    @property
    def native(self) -> bool:
        """Whether every projection runs in our kernel."""
        return all(linear.native is not None for linear in (self.qkv, self.out, self.gate_up, self.down))

    def into_attention(self, unit: torch.Tensor) -> torch.Tensor:
        """What `qkv` reads, of rows from `unit_rows`, which may be overwritten."""
        return unit if self.gains is None else unit.mul_(self.gains[0])

    def into_mlp(self, unit: torch.Tensor) -> torch.Tensor:
        """What `gate_up` reads, of rows from `unit_rows`, which may be overwritten."""
        return unit if self.gains is None else unit.mul_(self.gains[1])


class Workspace:
    """Buffers of a tile of `rows` rows with every view of them that attention needs, made once.

    After a large matrix product the caches are cold and every small call costs ten times what it does in a loop; the
    views alone would cost more than the attention of a short context.
    """

    def __init__(self, shape: LlamaShape, rows: int, device: torch.device) -> None:
        head_dim, kv_heads = padded_head(shape.head_dim), shape.kv_heads
        group, half = shape.heads // kv_heads, head_dim // 2
        heads = torch.zeros(rows, shape.heads + 2 * kv_heads, head_dim, device=device)
        self.fused = heads.view(rows, -1)  # q, k and v of a token side by side
        self.q, self.k, v = heads.split((shape.heads, kv_heads, kv_heads), 1)
        q_pairs = torch.view_as_complex(self.q.unflatten(-1, (half, 2)))
        self.q_pairs = q_pairs.unflatten(1, (kv_heads, group)).transpose(0, 1)  # [kv_heads, rows, group, half]
        self.k_pairs = torch.view_as_complex(self.k.unflatten(-1, (half, 2))).transpose(0, 1)  # [kv_heads, rows, half]
        self.v = v.transpose(0, 1)  # [kv_heads, rows, head_dim]
        self.rotated = torch.zeros(kv_heads, rows, group, half, dtype=torch.complex64, device=device)
        self.queries = torch.view_as_real(self.rotated).view(kv_heads, rows * group, head_dim)


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019), computed in fp32.

    `spare` zero columns follow the real ones and do not count. Besides the norm of a row it uses correctly rounded
    operations only, which are the same in vector and in scalar code.
    """

    def __init__(self, weight: torch.Tensor, eps: float, spare: int = 0) -> None:
        width = weight.shape[-1]
        self.floor = width * eps
        self.weight = F.pad(weight.float() * width**0.5, (0, spare))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(self.floor).sqrt_()
        return (wide / scale).mul_(self.weight).to(x.dtype)


def unit_rows(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """x [rows, d] / sqrt(Σx² + floor²) by row: RMSNorm without its factor √d · weight, in the fewest calls.

    `hypot` differs between vector and scalar code: the rows must be a power of two, so that all take the same.
    """
    wide = x.float()
    return (wide / torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), floor)).to(x.dtype)


def rotate(pairs: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor) -> None:
    """Write the complex product of pairs [kv_heads, rows, ...] and rotation [rows, ...] to `out`."""
    if pairs.numel() < GRAIN:
        torch.mul(pairs, rotation, out=out)
    else:
        for head, head_out in zip(pairs, out, strict=True):
            torch.mul(head, rotation, out=head_out)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up for gate_up [rows, 2 * intermediate] → [rows, intermediate]."""
    gate, up = gate_up.chunk(2, -1)
    if gate.numel() < GRAIN:
        return F.silu(gate).mul_(up)
    return torch.stack([F.silu(g).mul_(u) for g, u in zip(gate, up, strict=True)])
