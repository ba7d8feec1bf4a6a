"""Any causal language model that transformers loads, behind the `Target` protocol. Correct first, fast second."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from k3dspark.errors import BadInput
from k3dspark.target.checks import check_finite, check_rows, check_taps, wrong_commit
from k3dspark.target.protocol import RaggedRows, TargetOutput
from k3dspark.target.rollback import Rollback, Saved, can_crop, crop, first_state, restore, save, understands
from k3dspark.target.sequences import Sequences

PREFILL_ROWS = 512
UNBOUNDED_POSITIONS = 2**31 - 1
MOST_OWED = 8  # rows that wait for the next pass before they get a pass of their own (REPLAY)
MOST_SNAPSHOTS = 32  # rows of one forward that are copied one by one; a longer one is a prompt, kept whole (SNAPSHOT)
# Of the shift of the logits that another prefix causes. In fp32 rounding stays below 1e-3 and a forgotten state shows
# as 1e-1 and more; in 16 bits rounding alone reaches a few hundredths.
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
TOLERANCE_16_BITS = 0.25
STATE_TOLERANCE = 0.1  # of a recurrent state, in any dtype: rounding stays below 0.02, a forgotten state shows as 1
CACHE_REFUSED = (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError)


@dataclass
class _Sequence:
    cache: Any
    tokens: list[int] = field(default_factory=list)  # committed
    pending: torch.Tensor | None = None  # int64 [rows] of the last forward
    owed: int = 0  # the last so many committed tokens are not in the cache yet (REPLAY)
    saved: list[list[Saved]] = field(default_factory=list)  # before the last forward, then after each row (SNAPSHOT)


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
        self._takes_positions = "position_ids" in parameters  # not every model counts what its cache holds
        self._sequences: Sequences[_Sequence] = Sequences()
        self._records_past = False
        self.rollback = self._find_rollback()

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
        return self._sequences.open(_Sequence(self._new_cache()))

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return len(self._sequences[sequence].tokens)

    def close(self, sequence: int) -> None:
        """Free the sequence."""
        self._sequences.close(sequence)

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
            sequence, last = self._sequences[handle], first + count
            mine = ((wanted >= first) & (wanted < last)).nonzero()[:, 0]
            if count:
                logits[mine], taps[first:last] = self._advance(sequence, ids[first:last], wanted[mine] - first)
            first = last
        check_finite(logits)
        first = 0
        for handle, count in zip(rows.sequences, rows.lengths, strict=True):
            self._sequences[handle].pending = ids[first : first + count]
            first += count
        return TargetOutput(logits, taps)

    def commit(self, sequence: int, count: int) -> None:
        """Keep the first `count` rows of the last forward of this sequence, roll back the rest."""
        state = self._sequences[sequence]
        rows = 0 if state.pending is None else state.pending.shape[0]
        if state.pending is None or not 0 <= count <= rows:
            raise wrong_commit(sequence, count, rows)
        if rows and self.rollback is Rollback.CROP:
            crop(state.cache, rows - count)
        elif rows and count == rows:
            state.owed = 0
        elif 0 < count < len(state.saved):
            restore(state.cache, state.saved[count], rows - count)
        elif state.saved:
            restore(state.cache, state.saved[0], rows + state.owed)
            state.owed += count
        state.tokens += state.pending[:count].tolist()
        state.pending, state.saved = None, []

    def _advance(
        self, sequence: _Sequence, ids: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits fp32 [len(wanted), V] and taps [T, N*d] of `ids` [T] after the committed tokens of the sequence.

        Kept rows that REPLAY owes the cache ride along with the next rows, until they are too many: a pass of their
        own would cost nearly as much as a whole round wherever reading the weights is what takes the time.
        """
        if self.rollback is Rollback.CROP:
            return self._run(sequence.cache, ids, wanted, len(sequence.tokens), PREFILL_ROWS)
        past = torch.tensor(sequence.tokens, dtype=ids.dtype, device=ids.device)
        if self.rollback is Rollback.RECOMPUTE:
            logits, taps = self._call(None, torch.cat([past, ids]), wanted + len(past), 0)
            return logits, taps[len(past) :]
        owed = past[len(past) - sequence.owed :]
        alone = self.rollback is Rollback.SNAPSHOT and len(past) > len(owed)  # without a state many rows are right
        if len(owed) > (0 if self.rollback is Rollback.SNAPSHOT else MOST_OWED):
            self._run(sequence.cache, owed, wanted[:0], len(past) - len(owed), 1 if alone else len(owed))
            owed, sequence.owed = owed[:0], 0
            alone = self.rollback is Rollback.SNAPSHOT
        sequence.saved = [save(sequence.cache)]
        if not alone:
            rows, start = torch.cat([owed, ids]), len(past) - len(owed)
            logits, taps = self._run(sequence.cache, rows, wanted + len(owed), start, len(rows))
            return logits, taps[len(owed) :]
        saved = sequence.saved if len(ids) <= MOST_SNAPSHOTS else None
        return self._run(sequence.cache, ids, wanted, len(past), 1, saved)

    def _run(
        self,
        cache: Any,
        ids: torch.Tensor,
        wanted: torch.Tensor,
        start: int,
        step: int,
        saved: list[list[Saved]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and taps of `ids` after the `start` tokens that the cache holds, `step` rows a call.

        `saved` gets what `save` says between two calls.
        """
        pieces, order = [], []
        for first in range(0, ids.shape[0], step):
            if saved is not None and first:
                saved.append(save(cache))
            mine = ((wanted >= first) & (wanted < first + step)).nonzero()[:, 0]
            pieces.append(self._call(cache, ids[first : first + step], wanted[mine] - first, start + first))
            order.append(mine)
        logits, taps = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return logits[torch.cat(order).argsort()], taps

    def _call(
        self, cache: Any, ids: torch.Tensor, wanted: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments: dict[str, Any] = {"use_cache": cache is not None, "output_hidden_states": True, "return_dict": True}
        if cache is not None and self._cache_name is not None:
            arguments[self._cache_name] = cache
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(ids), device=ids.device)[None]
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
        if self._taps and states[1].shape[1:] != (len(ids), self.hidden_size):
            raise BadInput(
                f"the model's hidden states have shape {tuple(states[1].shape)}",
                f"a tap is one row of {self.hidden_size} numbers per token",
                "choose another target",
            )
        taps = [states[layer + 1][0] for layer in self._taps]
        return logits.float(), torch.cat(taps, -1) if taps else logits.new_empty(ids.shape[0], 0)

    def _find_rollback(self) -> Rollback:
        """By the cache's layers, and by running a few rows: a model may keep state where no cache reaches it.

        Two sequences side by side are continued by one row and by four, and held against the model without a cache.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (20,), generator=generator).to(self.model.device)
        mine, other, following = ids[:8], ids[8:16], ids[16:]
        last = torch.arange(8, 12)
        expected = self._call(None, torch.cat([mine, following]), last, 0)[0]
        shift = (self._call(None, torch.cat([other, following]), last, 0)[0] - expected).abs().mean()
        tolerance = TOLERANCE.get(self.model.dtype, TOLERANCE_16_BITS) * shift

        def continued(cache: Any, step: int) -> bool:
            self._call(cache, mine, last[:0], 0)
            self._call(self._new_cache(), other, last[:0], 0)  # what the model keeps elsewhere now belongs to this one
            logits, _ = self._run(cache, following, torch.arange(4), len(mine), step)
            return bool((logits - expected).abs().mean() <= tolerance)

        if self._cache_name is None:
            return Rollback.RECOMPUTE
        try:
            fresh = self._new_cache()
            self._call(fresh, mine, last[:0], 0)
            self._records_past = can_crop(fresh)
            one, many = self._new_cache(), self._new_cache()
            if not (understands(one) and continued(one, 1)):
                return Rollback.RECOMPUTE
            together = continued(many, 4)
        except CACHE_REFUSED:  # a cache class of its own
            return Rollback.RECOMPUTE
        if self._records_past:
            return Rollback.CROP if together else Rollback.RECOMPUTE
        left, right = first_state(one), first_state(many)
        if left is not None and right is not None:
            together = together and bool((left - right).norm() <= STATE_TOLERANCE * left.norm())
        return Rollback.REPLAY if together else Rollback.SNAPSHOT

    def _new_cache(self) -> Any:
        if self._cache_name is None:
            return None
        cache = DynamicCache(config=self.model.config)
        if self._records_past:
            cache.activate_past_recording()  # lets a window or a convolution be cut
        return cache
