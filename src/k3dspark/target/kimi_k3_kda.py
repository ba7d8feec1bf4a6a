"""Kimi Delta Attention: a short convolution, and a memory that forgets by channel (arXiv 2510.26692).

Nothing here writes into a state. A forward returns what its rows would do to it, `DeltaRows`; `DeltaRows.after` gives
the state after any number of them. That is the rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape
from k3dspark.model.ops import rms_norm
from k3dspark.target.kimi_k3_tensors import Tensors, wide_dtype

CHUNK = 16  # rows whose mutual influence is solved for at once; pairs of them need CHUNK² · head_dim numbers a head
NORM_EPS = 1e-6  # of the unit length of queries and keys


@dataclass(frozen=True)
class DeltaState:
    """What KDA layers remember of a sequence, leading dimensions [...] being layers or sequences."""

    inputs: Tensor  # [..., kernel - 1, 3 · width]: the last inputs of the convolution
    memory: Tensor  # [..., heads, head_dim, head_dim], key × value, fp32

    @classmethod
    def empty(cls, shape: KimiK3Shape, lead: Sequence[int], dtype: torch.dtype, device: torch.device) -> DeltaState:
        wide = wide_dtype(dtype)
        return cls(
            torch.zeros(*lead, shape.conv_kernel - 1, 3 * shape.kda_width, dtype=wide, device=device),
            torch.zeros(*lead, shape.kda_heads, shape.kda_head_dim, shape.kda_head_dim, dtype=wide, device=device),
        )


@dataclass(frozen=True)
class DeltaRows:
    """T provisional rows: all that advancing a state by a part of them takes. Leading dimensions as in the state."""

    inputs: Tensor  # [..., T, 3 · width]
    keys: Tensor  # [..., T, heads, head_dim]
    values: Tensor
    log_decay: Tensor
    beta: Tensor  # [..., T, heads]
    memory: Tensor  # of the state after all T rows

    @classmethod
    def stack(cls, layers: Sequence[DeltaRows]) -> DeltaRows:
        """[L, B, T, …] of the rows [B, T, …] of L layers."""
        return cls(*(torch.stack([getattr(layer, field.name) for layer in layers]) for field in fields(cls)))

    def of(self, sequence: int, count: int) -> DeltaRows:
        """[L, count, …]: the rows of one sequence, which fills the first `count` of the T slots."""
        inputs, keys, values, log_decay, beta = (
            t[:, sequence, :count] for t in (self.inputs, self.keys, self.values, self.log_decay, self.beta)
        )
        return DeltaRows(inputs, keys, values, log_decay, beta, self.memory[:, sequence])

    def after(self, before: DeltaState, count: int) -> DeltaState:
        """The state after the first `count` rows."""
        if count == 0:
            return before
        inputs = torch.cat([before.inputs, self.inputs[..., :count, :]], -2)[..., count:, :]
        if count == self.inputs.shape[-2]:
            return DeltaState(inputs, self.memory.contiguous())
        keys, values, log_decay = (t[..., :count, :, :] for t in (self.keys, self.values, self.log_decay))
        _, memory = delta_rule(keys, keys, values, log_decay, self.beta[..., :count, :], before.memory)
        return DeltaState(inputs, memory)


class DeltaAttention:
    """One KDA layer.

    The decay of a channel is exp(g), g = bound · σ(e^A · (f + dt_bias)) with the bound of −5 that Kimi K3 sets, else
    −e^A · softplus(f + dt_bias) as in Kimi-Linear. A_log has one number a head; the file pads it with zeros. The gate
    of the output is of full rank in Kimi K3; Kimi-Linear's of low rank is read as well. The convolution ends in SiLU.
    """

    def __init__(self, shape: KimiK3Shape, tensors: Tensors) -> None:
        self.heads, self.head_dim = shape.kda_heads, shape.kda_head_dim
        self.bound, self.eps = shape.gate_lower_bound, shape.eps
        self.qkv = torch.cat([tensors.get(f"{name}_proj.weight") for name in "qkv"])
        convolution = torch.cat([tensors.wide(f"{name}_conv1d.weight")[:, 0] for name in "qkv"])  # [3 · width, kernel]
        self.convolution = convolution.T.contiguous()
        self.forget_a, self.forget_b = tensors.get("f_a_proj.weight"), tensors.get("f_b_proj.weight")
        self.beta = tensors.get("b_proj.weight")
        self.speed = tensors.wide("A_log").flatten()[: self.heads].exp()[:, None]  # [heads, 1]
        self.forget_bias = tensors.wide("dt_bias").view(self.heads, self.head_dim)
        names = ("g_proj",) if shape.full_rank_gate else ("g_a_proj", "g_b_proj")
        self.gate = tuple(tensors.get(f"{name}.weight") for name in names)
        self.norm = tensors.wide("o_norm.weight")
        self.out = tensors.get("o_proj.weight")

    def __call__(self, x: Tensor, state: DeltaState, slots: Tensor, size: tuple[int, int]) -> tuple[Tensor, DeltaRows]:
        """Rows x [R, d], which stand at `slots` [R] of B sequences of at most T rows, `size` = (B, T).

        Returns the output [R, d] and the provisional rows [B, T, …]. A slot that no row fills changes no state: its
        beta is 0 and its decay is 1.
        """
        qkv = _spread(F.linear(x, self.qkv).to(state.inputs.dtype), slots, size)  # [B, T, 3 · width]
        query, key, value = (t.unflatten(-1, (self.heads, -1)) for t in self._convolve(qkv, state.inputs).chunk(3, -1))
        query, key = _unit(query) * self.head_dim**-0.5, _unit(key)
        log_decay = _spread(self._log_decay(x).flatten(1), slots, size).unflatten(-1, (self.heads, -1))
        beta = _spread(F.linear(x, self.beta).to(qkv.dtype).sigmoid(), slots, size)
        read, memory = delta_rule(query, key, value, log_decay, beta, state.memory)
        flat = read.reshape(-1, self.heads, self.head_dim)[slots]  # [R, heads, head_dim]
        gate = x
        for matrix in self.gate:
            gate = F.linear(gate, matrix)
        gated = rms_norm(flat, self.norm, self.eps) * gate.to(flat.dtype).sigmoid().view_as(flat)
        return F.linear(gated.flatten(1).to(x.dtype), self.out), DeltaRows(qkv, key, value, log_decay, beta, memory)

    def _convolve(self, rows: Tensor, before: Tensor) -> Tensor:
        seen = torch.cat([before, rows], 1)
        count = rows.shape[1]
        mixed = seen[:, :count] * self.convolution[0]
        for tap in range(1, self.convolution.shape[0]):
            mixed = mixed + seen[:, tap : tap + count] * self.convolution[tap]
        return F.silu(mixed)

    def _log_decay(self, x: Tensor) -> Tensor:
        raw = F.linear(F.linear(x, self.forget_a), self.forget_b).to(self.speed.dtype)
        raw = raw.view(-1, self.heads, self.head_dim) + self.forget_bias
        if self.bound is not None:
            return self.bound * (self.speed * raw).sigmoid()
        return -self.speed * F.softplus(raw)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """S ← diag(e^g)·S; S ← S + β·k·(v − kᵀS)ᵀ; read qᵀS, row by row, in chunks of `CHUNK` rows.

    query, key, value, log_decay [..., T, H, D], beta [..., T, H], memory [..., H, D, D] → read [..., T, H, D] and the
    memory after the last row.
    """
    wide = [t.transpose(-3, -2) for t in (query, key, value, log_decay)]  # [..., H, T, D]
    beta = beta.transpose(-2, -1).unsqueeze(-1)  # [..., H, T, 1]
    pieces = []
    for first in range(0, beta.shape[-2], CHUNK):
        part = [t[..., first : first + CHUNK, :] for t in (*wide, beta)]
        read, memory = _chunk(part[0], part[1], part[2], part[3], part[4], memory)
        pieces.append(read)
    return torch.cat(pieces, -2).transpose(-3, -2), memory


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Up to `CHUNK` rows [..., C, D] at once.

    What row i writes is u_i = β_i (v_i − (k_i e^{G_i})ᵀS − Σ_{j<i} a_ij u_j) with G the running sum of g and
    a_ij = Σ_c k_ic k_jc e^{G_ic − G_jc}: a unit lower triangular system in u.
    """
    total = log_decay.cumsum(-2)  # G
    # Decay from row j to row i; clamped, because where j > i it would overflow before it is masked.
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp(max=0).exp()  # [..., i, j, D]
    held = key.unsqueeze(-3) * between
    among = torch.matmul(held, key.unsqueeze(-1)).squeeze(-1)  # a
    reads = torch.matmul(held, query.unsqueeze(-1)).squeeze(-1).tril()
    from_start = total.exp()
    wanted = beta * (value - (key * from_start) @ memory)
    identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    written = torch.linalg.solve_triangular(
        identity + (beta * among).tril(-1), wanted, upper=False, unitriangular=True
    )  # u [..., C, D]
    read = (query * from_start) @ memory + reads @ written
    to_end = (total[..., -1:, :] - total).exp()
    memory = from_start[..., -1, :].unsqueeze(-1) * memory + (key * to_end).transpose(-2, -1) @ written
    return read, memory


def _spread(rows: Tensor, slots: Tensor, size: tuple[int, int]) -> Tensor:
    """Rows [R, n] put at their slots of [B, T, n], zeros elsewhere."""
    if rows.shape[0] == size[0] * size[1]:
        return rows.view(*size, -1)
    spread = rows.new_zeros(size[0] * size[1], rows.shape[1])
    spread[slots] = rows
    return spread.view(*size, -1)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
