"""Small, exact stand-ins shared by tests: a target in fp64 and drafts whose acceptance is known in advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling, Proposal
from k3dspark.target.protocol import RaggedRows, Target, TargetOutput


class ToyTarget:
    """A random causal attention network in fp64 that recomputes every sequence from its tokens.

    It keeps nothing but token ids, so its rollback cannot be wrong, and it refuses any use that the `Target` protocol
    does not allow: an uncommitted second forward, a position outside the window, an unknown handle.
    """

    def __init__(self, vocab_size: int = 11, max_positions: int = 64, seed: int = 0, sharpness: float = 3.0) -> None:
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.hidden_size, self.layers = 8, 3
        self.tap_layer_ids = (0, 1, 2)
        random = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5

        d = self.hidden_size
        self._embed = weights(vocab_size, d) * d**0.5
        self._place = weights(max_positions, d) * d**0.5
        self._qkv = [weights(3 * d, d) * 2 for _ in range(self.layers)]
        self._mix = [weights(d, d) * 2 for _ in range(self.layers)]
        self._head = torch.nn.functional.normalize(weights(vocab_size, d)) * sharpness
        self._committed: dict[int, list[int]] = {}
        self._pending: dict[int, list[int]] = {}
        self._next = 0
        self.forward_rows: list[int] = []
        self.poison: Callable[[Tensor], Tensor] = lambda logits: logits

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed[token_ids]

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head.T

    def open(self, capacity: int = 0) -> int:
        self._next += 1
        self._committed[self._next] = []
        return self._next

    def length(self, sequence: int) -> int:
        return len(self._committed[sequence])

    def close(self, sequence: int) -> None:
        del self._committed[sequence]
        self._pending.pop(sequence, None)

    @property
    def open_sequences(self) -> int:
        return len(self._committed)

    def forward(self, rows: RaggedRows) -> TargetOutput:
        assert len(rows.sequences) == len(rows.lengths) == len(set(rows.sequences))
        assert sum(rows.lengths) == len(rows.token_ids)
        assert rows.token_ids.dtype == torch.int64
        assert 0 <= int(rows.token_ids.min()) <= int(rows.token_ids.max()) < self.vocab_size
        self.forward_rows.append(len(rows.token_ids))
        logits, taps = [], []
        for sequence, ids in zip(rows.sequences, rows.token_ids.split(list(rows.lengths)), strict=True):
            assert sequence not in self._pending, "an earlier forward was never committed"
            self._pending[sequence] = ids.tolist()
            hidden, tapped = self.run(torch.tensor(self._committed[sequence] + ids.tolist()))
            logits.append(self.unembed(hidden[-len(ids) :]))
            taps.append(tapped[-len(ids) :])
        every = torch.cat(logits)
        wanted = every if rows.logit_rows is None else every[rows.logit_rows]
        return TargetOutput(self.poison(wanted), torch.cat(taps))

    def commit(self, sequence: int, count: int) -> None:
        pending = self._pending.pop(sequence)
        assert 0 <= count <= len(pending)
        self._committed[sequence] += pending[:count]

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [T, d] and taps [T, N*d] of one whole sequence."""
        assert len(ids) <= self.max_positions, "a position outside the window"
        hidden = self._embed[ids] + self._place[: len(ids)]
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        taps = []
        for qkv, mix in zip(self._qkv, self._mix, strict=True):
            query, key, value = (hidden @ qkv.T).chunk(3, -1)
            scores = (query @ key.T / self.hidden_size**0.5).masked_fill(~mask, -torch.inf)
            hidden = torch.sin(1.5 * hidden + scores.softmax(-1) @ value @ mix.T)
            taps.append(hidden)
        return hidden, torch.cat(taps, -1)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain greedy decoding, written without any engine."""
        ids = list(prompt)
        for _ in range(count):
            hidden, _ = self.run(torch.tensor(ids))
            ids.append(int(self.unembed(hidden[-1]).argmax()))
        return ids[len(prompt) :]


def toy_config(target: Target, **changes: object) -> K3DSparkConfig:
    """A two-layer draft for a toy target."""
    fields: dict[str, object] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": max(target.tap_layer_ids) + 1,
        "num_target_layers": len(target.tap_layer_ids),
        "target_layer_ids": list(target.tap_layer_ids),
        "mask_token_id": target.vocab_size - 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "block_size": 7,
    }
    return K3DSparkConfig(**(fields | changes))


def toy_draft(
    target: Target, seed: int = 0, kind: type[K3DSparkModel] = K3DSparkModel, **changes: object
) -> K3DSparkModel:
    """A random draft in fp64."""
    config = toy_config(target, **changes)
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(config.draft_vocab_size, config.hidden_size, generator=random, dtype=torch.float64)
    draft = kind(config, lm_head=head).double().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            norm = name.endswith("norm.weight")
            parameter.copy_(
                torch.ones(parameter.shape)
                if norm
                else torch.randn(parameter.shape, generator=random) / max(parameter.shape[-1], 1) ** 0.5
            )
    return draft


class ScriptedDraft(K3DSparkModel):
    """A draft with real context rows whose tokens come from `script(position) -> token` (position of the token).

    Its confidence says 0.9 everywhere.
    """

    script: Callable[[int], int]

    def propose(
        self,
        caches: Sequence[LatentCache],
        anchor_ids: Tensor,
        positions: Tensor,
        sampling: DraftSampling | None = None,
    ) -> Proposal:
        tokens = [[self.script(n + 1 + k) for k in range(self.block_size)] for n in positions.tolist()]
        return Proposal(torch.tensor(tokens), torch.full((len(tokens), self.block_size), 2.2))


def oracle(
    target: ToyTarget, prompt: Sequence[int], length: int, wrong_at: Callable[[int], bool] = lambda _: False
) -> K3DSparkModel:
    """A draft that knows the target's greedy continuation, and is wrong exactly where `wrong_at(position)` says."""
    return scripted(target, [*prompt, *target.greedy(prompt, length)], wrong_at)


def scripted(target: Target, answer: Sequence[int], wrong_at: Callable[[int], bool] = lambda _: False) -> K3DSparkModel:
    """A draft that proposes `answer[position]`, or another token where `wrong_at(position)` says so."""

    def script(position: int) -> int:
        right = answer[position] if position < len(answer) else 0
        return (right + 1) % target.vocab_size if wrong_at(position) else right

    draft = toy_draft(target, kind=ScriptedDraft)
    assert isinstance(draft, ScriptedDraft)
    draft.script = script
    return draft
