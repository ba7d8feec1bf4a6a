"""Throughput forward of a Llama-family target for training data: left-padded batches, plain kernels.

Not the verified target: results here depend on the batch shape in the last bits. It feeds
`training/regenerate.py`, where only the distribution matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F

from k3dspark.model.ops import rms_norm
from k3dspark.target.weights import LlamaWeights

PREFILL_ROWS = 16  # prompts run at once


class Selectable(Protocol):
    """What B sequences hold."""

    def select(self, rows: torch.Tensor) -> Self:
        """The sequences at `rows` [B']; one may be named twice."""
        ...


State = TypeVar("State", bound=Selectable)


@dataclass(frozen=True)
class Prefilled(Generic[State]):
    """P prompts after a prefill: their state, their last hidden rows [P, d], and, if recorded, all rows in fp16."""

    state: State
    last: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]  # (final-normed hidden [T, d], taps [T, N*d]) of each prompt


class Stepped(Protocol):
    """A target that answers many prompts in step, for training data."""

    head: torch.Tensor  # [V, d]

    def prefill(self, prompts: Sequence[Sequence[int]], room: int, record: bool) -> Prefilled[Any]:
        """Run whole prompts; `room` more tokens will follow each."""
        ...

    def step(self, ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one more token [B] of every sequence → (final-normed hidden [B, d], taps [B, N*d])."""
        ...


@dataclass
class BatchState:
    """Key/value cache of a left-padded batch; `length` columns are filled, `valid` marks real ones."""

    keys: torch.Tensor  # [layers, B, kv_heads, capacity, head_dim]
    values: torch.Tensor
    valid: torch.Tensor  # bool [B, capacity]
    next_position: torch.Tensor  # int64 [B]
    length: int = 0

    def select(self, rows: torch.Tensor) -> BatchState:
        return BatchState(
            self.keys[:, rows], self.values[:, rows], self.valid[rows], self.next_position[rows], self.length
        )


class BatchForward:
    """Runs a batch of sequences in step; returns final hidden states and, on request, the taps."""

    def __init__(self, weights: LlamaWeights, tap_layer_ids: tuple[int, ...]) -> None:
        self.weights = weights
        self.tap_layer_ids = tap_layer_ids
        self.head = weights.head
        shape = weights.shape
        angles = torch.outer(torch.arange(shape.max_positions).float(), torch.tensor(shape.inv_freq))
        table = torch.cat([angles, angles], -1)
        self._cos, self._sin = table.cos() * shape.rope_multiplier, table.sin() * shape.rope_multiplier

    def new_state(self, batch: int, capacity: int) -> BatchState:
        s = self.weights.shape
        kv = torch.zeros(2, s.layers, batch, s.kv_heads, capacity, s.head_dim)
        return BatchState(
            kv[0], kv[1], torch.zeros(batch, capacity, dtype=torch.bool), torch.zeros(batch, dtype=torch.long)
        )

    def prefill(self, prompts: Sequence[Sequence[int]], room: int, record: bool) -> Prefilled[BatchState]:
        """Run whole prompts, left-padded, some at a time; `room` is the capacity kept for what follows."""
        width = max(len(p) for p in prompts)
        state = self.new_state(len(prompts), width + room)
        state.length = width
        last = torch.empty(len(prompts), self.weights.shape.hidden_size)
        recorded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(by_length), PREFILL_ROWS):  # near lengths together: little padding
            rows = by_length[start : start + PREFILL_ROWS]
            part = [prompts[i] for i in rows]
            longest = len(part[-1])
            ids = torch.zeros(len(part), longest, dtype=torch.long)
            valid = torch.zeros(len(part), longest, dtype=torch.bool)
            for row, prompt in enumerate(part):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                valid[row, longest - len(prompt) :] = True
            small = self.new_state(len(part), longest)
            hidden, taps = self.forward(ids, small, valid)
            state.keys[:, rows, :, width - longest : width] = small.keys
            state.values[:, rows, :, width - longest : width] = small.values
            state.valid[rows, width - longest : width] = small.valid
            state.next_position[rows] = small.next_position
            last[rows] = hidden[:, -1]
            if record:
                for row, index in enumerate(rows):
                    own = slice(longest - len(part[row]), None)
                    recorded[index] = hidden[row, own].half(), taps[row, own].half()
        return Prefilled(state, last, [recorded[i] for i in range(len(recorded))])

    def step(self, ids: torch.Tensor, state: BatchState) -> tuple[torch.Tensor, torch.Tensor]:
        """One token [B] for every sequence → (final-normed hidden [B, d], taps [B, N*d])."""
        hidden, taps = self.forward(ids[:, None], state)
        return hidden[:, 0], taps[:, 0]

    def forward(
        self, ids: torch.Tensor, state: BatchState, valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, T] → (final-normed hidden [B, T, d], taps [B, T, N*d]); `valid` [B, T] is False on left padding."""
        w, s = self.weights, self.weights.shape
        batch, count = ids.shape
        valid = torch.ones(batch, count, dtype=torch.bool) if valid is None else valid
        start, end = state.length, state.length + count
        positions = (state.next_position[:, None] + valid.cumsum(-1) - 1).clamp(min=0)  # [B, T]
        state.valid[:, start:end] = valid
        state.next_position = state.next_position + valid.sum(-1)
        state.length = end
        causal = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]  # [T, end]
        mask = (causal[None] & state.valid[:, None, :end])[:, None]  # [B, 1, T, end]
        mask = mask | ~valid[:, None, :, None]  # padding rows see everything: no NaN
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [B, 1, T, head_dim]

        hidden = w.embed[ids]
        taps = []
        sizes = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        for index, layer in enumerate(w.layers):
            normed = rms_norm(hidden, layer.input_norm, s.rms_norm_eps)
            q, k, v = F.linear(normed, layer.qkv, layer.qkv_bias).split(sizes, -1)
            q, k, v = (t.view(batch, count, -1, s.head_dim).transpose(1, 2) for t in (q, k, v))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, s.rms_norm_eps), rms_norm(k, layer.k_norm, s.rms_norm_eps)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            state.keys[index, :, :, start:end] = k
            state.values[index, :, :, start:end] = v
            attended = F.scaled_dot_product_attention(
                q, state.keys[index, :, :, :end], state.values[index, :, :, :end], attn_mask=mask, enable_gqa=True
            )
            flat = attended.transpose(1, 2).reshape(batch, count, -1)
            hidden = hidden + F.linear(flat, layer.out, layer.out_bias)
            gate, up = F.linear(rms_norm(hidden, layer.post_norm, s.rms_norm_eps), layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            if index in self.tap_layer_ids:
                taps.append(hidden)
        return rms_norm(hidden, w.final_norm, s.rms_norm_eps), torch.cat(taps, -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
