"""Throughput forward of Kimi K3 for training data: many sequences in step, nothing rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3dspark.checkpoint.kimi_k3 import KimiK3Shape
from k3dspark.model.cache import LatentCache
from k3dspark.target.batch import PREFILL_ROWS, Prefilled
from k3dspark.target.checks import check_finite
from k3dspark.target.kimi_k3_kda import DeltaState
from k3dspark.target.kimi_k3_model import Batch, KimiK3Model, StackOutput, TapStream

CACHE_BLOCK = 256  # tokens: answers for training are short


@dataclass
class KimiK3BatchState:
    """What B sequences hold: memories of the KDA layers, rows of the MLA layers."""

    delta: DeltaState  # [L, B, …]
    latent: list[LatentCache]  # of each sequence

    def select(self, rows: torch.Tensor) -> KimiK3BatchState:
        """The sequences at `rows`; one that is named twice goes on as two."""
        taken: set[int] = set()
        latent = []
        for row in rows.tolist():
            latent.append(self.latent[row].copy() if row in taken else self.latent[row])
            taken.add(row)
        return KimiK3BatchState(DeltaState(self.delta.inputs[:, rows], self.delta.memory[:, rows]), latent)


class KimiK3BatchForward:
    """The target's side of `training/regenerate.py`, in either stream of taps."""

    def __init__(self, model: KimiK3Model, tap_layer_ids: Sequence[int], stream: TapStream = "prefix") -> None:
        self.model, self.tap_layer_ids, self.stream = model, tuple(tap_layer_ids), stream
        self.head, self.hidden_size = model.head_weight, model.shape.hidden_size

    def prefill(self, prompts: Sequence[Sequence[int]], room: int, record: bool) -> Prefilled[KimiK3BatchState]:
        """Run whole prompts, some at a time; the caches grow by themselves, whatever `room`."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # near lengths together: little padding
        deltas: dict[int, DeltaState] = {}
        latent = [self._cache() for _ in prompts]
        last = torch.empty(len(prompts), self.hidden_size)
        rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for start in range(0, len(order), PREFILL_ROWS):
            part = order[start : start + PREFILL_ROWS]
            lengths = tuple(len(prompts[i]) for i in part)
            state = DeltaState.empty(self.model.shape, (self._kda, len(part)), self.head.dtype, self.head.device)
            ids = torch.tensor([token for i in part for token in prompts[i]])
            output = self._run(ids, lengths, KimiK3BatchState(state, [latent[i] for i in part]))
            first = 0
            for row, (index, count) in enumerate(zip(part, lengths, strict=True)):
                own = slice(first, first + count)
                latent[index].append(output.latent[:, own])
                before = DeltaState(state.inputs[:, row], state.memory[:, row])
                deltas[index] = before if output.delta is None else output.delta.of(row, count).after(before, count)
                last[index] = output.hidden[first + count - 1]
                if record:
                    rows[index] = output.hidden[own].half(), output.taps[own].half()
                first += count
        states = [deltas[i] for i in range(len(prompts))]
        joined = DeltaState(torch.stack([s.inputs for s in states], 1), torch.stack([s.memory for s in states], 1))
        return Prefilled(KimiK3BatchState(joined, latent), last, [rows[i] for i in range(len(rows))])

    def step(self, ids: torch.Tensor, state: KimiK3BatchState) -> tuple[torch.Tensor, torch.Tensor]:
        """One token [B] for every sequence → (final-normed hidden [B, d], taps [B, N*d]); the state goes on."""
        output = self._run(ids, (1,) * len(ids), state)
        for row, cache in enumerate(state.latent):
            cache.append(output.latent[:, row : row + 1])
        if output.delta is not None:
            state.delta = output.delta.after(state.delta, 1)
        return output.hidden, output.taps

    def _run(self, ids: torch.Tensor, lengths: tuple[int, ...], state: KimiK3BatchState) -> StackOutput:
        width = max(lengths)
        slots = torch.tensor([index * width + row for index, count in enumerate(lengths) for row in range(count)])
        contexts = [
            [cache.chunks(layer) for cache in state.latent] for layer in range(len(self.model.shape.mla_layers))
        ]
        batch = Batch(lengths, slots, state.delta, contexts)
        output = self.model.stack(ids, batch, self.tap_layer_ids, self.stream)
        check_finite(output.hidden)
        return output

    @property
    def _kda(self) -> int:
        return len(self.model.shape.kda_layers)

    def _cache(self) -> LatentCache:
        shape: KimiK3Shape = self.model.shape
        return LatentCache(len(shape.mla_layers), shape.row_width, self.head.dtype, self.head.device, CACHE_BLOCK)
