"""Any causal language model that transformers loads, behind the `Target` protocol. Correct first, fast second."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from k3dspark.errors import BadInput
from k3dspark.target.checks import check_finite, check_rows, check_taps, not_open, wrong_commit
from k3dspark.target.protocol import RaggedRows, TargetOutput

PREFILL_ROWS = 512
UNBOUNDED_POSITIONS = 2**31 - 1
STATE_TOLERANCE = 1e-4  # relative, fp32: rounding stays below 1e-6, a forgotten state shows above 1e-3


class Rollback(Enum):
    """How a sequence returns to an earlier length."""

    CROP = "crop"  # attention caches: cut the rejected rows off
    REPLAY = "replay"  # recurrent or convolution states: restore a copy, run the kept rows again
    RECOMPUTE = "recompute"  # no cache this adapter understands: run the whole sequence every time


@dataclass
class _Sequence:
    cache: Any
    tokens: list[int] = field(default_factory=list)  # committed
    pending: torch.Tensor | None = None  # int64 [rows] of the last forward
    saved: Any = None  # the cache before the last forward, for REPLAY


class TransformersTarget:
    """`Target` over a loaded transformers causal model; sequences of a ragged call run one after another.

    A tap is `hidden_states[i + 1]`, the residual stream after layer i. transformers reports the last layer only after
    the final norm, so the last layer cannot be tapped here. Results are not bitwise independent of how tokens were
    split into calls (`exact` is False): rounding decides near-ties.
    """

    exact = False

    def __init__(self, model: PreTrainedModel, tap_layer_ids: Sequence[int] = ()) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self._config = config
        self._taps = check_taps(tap_layer_ids, int(config.num_hidden_layers) - 1)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        self._keeps_logits = "logits_to_keep" in parameters
        self._sequences: dict[int, _Sequence] = {}
        self._handles = itertools.count()
        self.rollback = self._find_rollback()
        self._row_by_row = self.rollback is Rollback.REPLAY and not self._continues_with_many_rows()

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self._taps

    @property
    def vocab_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self._config.hidden_size)

    @property
    def max_positions(self) -> int:
        return int(getattr(self._config, "max_position_embeddings", None) or UNBOUNDED_POSITIONS)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., d] of the embedding table for token ids [...], before any scaling the model applies."""
        with torch.no_grad():
            embedded: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., V] of final-normed hidden states [..., d], before any soft-capping the model applies."""
        with torch.no_grad():
            logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    def open(self, capacity: int = 0) -> int:
        """A handle for a new empty sequence."""
        handle = next(self._handles)
        self._sequences[handle] = _Sequence(self._new_cache())
        return handle

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return len(self._sequence(sequence).tokens)

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        self._sequence(sequence)
        del self._sequences[sequence]

    def forward(self, rows: RaggedRows) -> TargetOutput:
        """Run rows after the committed tokens of their sequences; provisional until `commit`.

        Raises `BadInput` past `max_positions` or for a token id outside the vocabulary, `EngineFault` when the
        logits are not finite.
        """
        pending = {handle for handle, sequence in self._sequences.items() if sequence.pending is not None}
        check_rows(rows, self.length, pending, self.max_positions, self.vocab_size)
        ids = rows.token_ids.to(self.model.device)
        wanted = torch.arange(ids.shape[0]) if rows.logit_rows is None else rows.logit_rows.cpu()
        logits = torch.empty(wanted.shape[0], self.vocab_size, device=ids.device)
        taps = torch.empty(ids.shape[0], len(self._taps) * self.hidden_size, dtype=self.model.dtype, device=ids.device)
        first = 0
        for handle, count in zip(rows.sequences, rows.lengths, strict=True):
            sequence, last = self._sequence(handle), first + count
            mine = ((wanted >= first) & (wanted < last)).nonzero()[:, 0]
            if count:
                if self.rollback is Rollback.REPLAY:
                    sequence.saved = copy.deepcopy(sequence.cache)
                logits[mine], taps[first:last] = self._run(sequence, ids[first:last], wanted[mine] - first)
            first = last
        check_finite(logits)
        first = 0
        for handle, count in zip(rows.sequences, rows.lengths, strict=True):
            self._sequence(handle).pending = ids[first : first + count]
            first += count
        return TargetOutput(logits, taps)

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        state = self._sequence(sequence)
        rows = 0 if state.pending is None else state.pending.shape[0]
        if state.pending is None or not 0 <= count <= rows:
            raise wrong_commit(sequence, count, rows)
        kept = state.pending[:count]
        if self.rollback is Rollback.CROP:
            if rows:
                state.cache.crop(count - rows)  # also when 0: a sliding window drops what it no longer needs
        elif self.rollback is Rollback.REPLAY and count < rows:
            state.cache = state.saved
            if count:
                self._run(state, kept, torch.empty(0, dtype=torch.long))
        state.tokens += kept.tolist()
        state.pending = state.saved = None

    def _run(self, sequence: _Sequence, ids: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits fp32 [len(wanted), V] and taps [T, N*d] of `ids` [T] after what the sequence's cache holds."""
        if self.rollback is Rollback.RECOMPUTE:
            past = torch.tensor(sequence.tokens, dtype=ids.dtype, device=ids.device)
            logits, taps = self._call(None, torch.cat([past, ids]), wanted + past.shape[0])
            return logits, taps[past.shape[0] :]
        step = ids.shape[0] if self.rollback is Rollback.REPLAY else PREFILL_ROWS
        if self._row_by_row and sequence.tokens:
            step = 1
        pieces, order = [], []
        for first in range(0, ids.shape[0], step):
            mine = ((wanted >= first) & (wanted < first + step)).nonzero()[:, 0]
            pieces.append(self._call(sequence.cache, ids[first : first + step], wanted[mine] - first))
            order.append(mine)
        logits, taps = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return logits[torch.cat(order).argsort()], taps

    def _call(self, cache: Any, ids: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: dict[str, Any] = {"use_cache": cache is not None, "output_hidden_states": True, "return_dict": True}
        if cache is not None and self._cache_name is not None:
            arguments[self._cache_name] = cache
        if self._keeps_logits:
            arguments["logits_to_keep"] = wanted.to(ids.device)
        with torch.no_grad():
            output = self.model(ids[None], **arguments)
        logits = output.logits[0] if self._keeps_logits else output.logits[0, wanted.to(ids.device)]
        states = output.hidden_states
        if len(states) != self._config.num_hidden_layers + 1:
            raise BadInput(
                f"the model reports {len(states)} hidden states",
                f"one per layer and the embedding, {self._config.num_hidden_layers + 1}, are needed to tap it",
                "choose another target",
            )
        taps = [states[layer + 1][0] for layer in self._taps]
        return logits.float(), torch.cat(taps, -1) if taps else logits.new_empty(ids.shape[0], 0)

    def _find_rollback(self) -> Rollback:
        cache = self._new_cache()
        if cache is None:
            return Rollback.RECOMPUTE
        attention = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
        return Rollback.CROP if all(type(layer) in attention for layer in cache.layers) else Rollback.REPLAY

    def _new_cache(self) -> Any:
        if self._cache_name is None:
            return None
        cache = DynamicCache(config=self.model.config)
        if all(isinstance(layer, DynamicLayer | DummyLayer) for layer in cache.layers):
            cache.activate_past_recording()  # lets a sliding window be cropped
        return cache

    def _continues_with_many_rows(self) -> bool:
        """Whether the model, given a state, uses it for more than one row; some recurrent models start afresh.

        Two prefixes must move the next logits by the same amount in a one-row and in a four-row call. Rounding would
        hide that in 16 bits, so there the answer is no: one row at a time is always right.
        """
        if self.model.dtype != torch.float32:
            return False
        ids = torch.arange(1, 37, device=self.model.device) % self.vocab_size
        following, first = ids[32:], torch.zeros(1, dtype=torch.long)
        moved = []
        for rows in (1, 4):
            after = []
            for prefix in (ids[:16], ids[16:32]):
                cache = self._new_cache()
                self._call(cache, prefix, first)
                after.append(self._call(cache, following[:rows], first)[0])
            moved.append(after[0] - after[1])
        return bool((moved[0] - moved[1]).abs().max() < STATE_TOLERANCE * moved[0].abs().max())

    def _sequence(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise not_open(sequence)
        return self._sequences[sequence]
