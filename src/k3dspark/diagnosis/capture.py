"""What the target says and what its layers hand over, recorded once for all experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.diagnosis.wiring import Stream, Tap
from k3dspark.target.batch import BatchForward
from k3dspark.target.protocol import RaggedRows, Target, TargetOutput
from k3dspark.target.weights import LlamaWeights

BATCH = 16  # conversations run together


@dataclass(frozen=True)
class Conversation:
    """A prompt with the target's greedy answer, ids [n], and the taps [n − 1, d] of every recorded place."""

    ids: Tensor
    answer_start: int
    taps: dict[Tap, Tensor]

    def read(self, taps: Sequence[Tap]) -> Tensor:
        """The rows [n − 1, N·d] that these taps give, in this order."""
        return torch.cat([self.taps[tap] for tap in taps], -1)


class Recorder(Protocol):
    """A target that answers prompts and keeps its taps."""

    @property
    def layers(self) -> range:
        """Layers that can be tapped."""
        ...

    @property
    def streams(self) -> tuple[Stream, ...]: ...

    def record(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_ids: Sequence[int], layers: Sequence[int]
    ) -> list[Conversation]:
        """Answer prompts greedily, keeping the output of `layers` in every stream."""
        ...


class BatchRecorder:
    """Llama-family targets, all prompts in step: several times as fast on a CPU as tiles that are exact."""

    streams: tuple[Stream, ...] = ("prefix",)

    def __init__(self, weights: LlamaWeights) -> None:
        self.weights = weights
        self.layers = range(weights.shape.layers)

    @torch.no_grad()
    def record(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_ids: Sequence[int], layers: Sequence[int]
    ) -> list[Conversation]:
        forward = BatchForward(self.weights, tuple(layers))
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        valid = torch.zeros(len(prompts), width, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            valid[row, width - len(prompt) :] = True
        state = forward.new_state(len(prompts), width + new_tokens)
        hidden, taps = forward.forward(ids, state, valid)
        fed, kept = [], [taps]
        for _ in range(new_tokens):
            fed.append((hidden[:, -1] @ self.weights.head.T).argmax(-1))  # [B]
            if len(fed) < new_tokens:
                hidden, taps = forward.forward(fed[-1][:, None], state)
                kept.append(taps)
        answers, rows = torch.stack(fed, 1), torch.cat(kept, 1)  # [B, new], [B, width + new − 1, N·d]
        found = []
        for row, prompt in enumerate(prompts):
            answer = answers[row, : _until_stop(answers[row].tolist(), stop_ids)]
            whole = torch.cat([torch.tensor(list(prompt)), answer])
            own = rows[row, width - len(prompt) : width + len(answer) - 1]
            found.append(Conversation(whole, len(prompt), _by_tap(own, layers, "prefix")))
        return found


class EngineRecorder:
    """Any target, through the engine that decodes plainly; `opened` gives it with the taps of chosen layers."""

    def __init__(
        self,
        opened: Callable[[Sequence[int], Stream], Target],
        layers: range,
        streams: tuple[Stream, ...] = ("prefix",),
    ) -> None:
        self.opened, self.layers, self.streams = opened, layers, streams

    @torch.no_grad()
    def record(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, stop_ids: Sequence[int], layers: Sequence[int]
    ) -> list[Conversation]:
        kept = _Kept(self.opened(layers, self.streams[0]))
        engine = Engine(kept)
        params = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=tuple(stop_ids))
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while not engine.idle:
            engine.step()
        found = []
        for request, rows in zip(requests, kept.rows(), strict=True):  # opened in the order of the queue
            if request.error is not None:
                raise request.error
            whole = torch.tensor([*request.prompt_ids, *request.new_ids])
            taps = _by_tap(rows[: len(whole) - 1], layers, self.streams[0])
            found.append(Conversation(whole, len(request.prompt_ids), taps))
        for stream in self.streams[1:]:
            again = self.opened(layers, stream)
            found = [replace(c, taps={**c.taps, **_by_tap(_reread(again, c.ids), layers, stream)}) for c in found]
        return found


class _Kept:
    """A target whose taps are kept, sequence by sequence: plain decoding rejects no row that it runs."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rows: dict[int, list[Tensor]] = {}  # by handle, in the order they were opened

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self._target.tap_layer_ids

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._target.hidden_size

    @property
    def max_positions(self) -> int:
        return self._target.max_positions

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._target.embed(token_ids)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self._target.unembed(hidden)

    def open(self, capacity: int = 0) -> int:
        handle = self._target.open(capacity)
        self._rows[handle] = []
        return handle

    def length(self, sequence: int) -> int:
        return self._target.length(sequence)

    def forward(self, rows: RaggedRows) -> TargetOutput:
        output = self._target.forward(rows)
        for sequence, taps in zip(rows.sequences, output.taps.split(list(rows.lengths)), strict=True):
            self._rows[sequence].append(taps.clone())
        return output

    def commit(self, sequence: int, count: int) -> None:
        self._target.commit(sequence, count)

    def close(self, sequence: int) -> None:
        self._target.close(sequence)

    def rows(self) -> list[Tensor]:
        """Taps [rows, N·d] of each sequence, in the order they were opened."""
        return [torch.cat(parts) for parts in self._rows.values()]


def _reread(target: Target, ids: Tensor) -> Tensor:
    """Taps of a whole text but its last token."""
    handle = target.open(len(ids))
    try:
        return target.forward(RaggedRows((handle,), (len(ids) - 1,), ids[:-1], torch.tensor([0]))).taps
    finally:
        target.close(handle)


def _by_tap(rows: Tensor, layers: Sequence[int], stream: Stream) -> dict[Tap, Tensor]:
    parts = rows.chunk(len(layers), -1)
    return {Tap(layer, stream): part.contiguous() for layer, part in zip(layers, parts, strict=True)}


def _until_stop(answer: Sequence[int], stop_ids: Sequence[int]) -> int:
    """How many tokens an answer has, its stop token included."""
    return next((index + 1 for index, token in enumerate(answer) if token in stop_ids), len(answer))
