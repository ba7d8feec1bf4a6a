"""The DSpark draft network: context rows, one block, and the proposal (spec §A–C)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from k3dspark.errors import BadInput
from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.heads import ConfidenceHead, Embedding, MarkovHead
from k3dspark.model.layers import Linear, RMSNorm, SwiGLU
from k3dspark.model.mapped import MappedFile
from k3dspark.model.mla import Angles, LatentAttention
from k3dspark.model.proposal import DraftSampling, Proposal
from k3dspark.model.rope import Rope
from k3dspark.model.streamed import LinearMap, lay_out


class DraftLayer(nn.Module):
    """Pre-norm residual layer: attention, then SwiGLU."""

    def __init__(self, config: K3DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)


class K3DSparkModel(nn.Module):
    """A block-parallel draft with a sequential Markov head.

    The state dict holds exactly the tensors of spec §J.1 (68 at Kimi K3 geometry). `lm_head` is the target's and
    is not part of it: pass it, or let `model.loading.load_draft` find it. With a draft vocabulary smaller than
    the target's, `lm_head` has the rows of the draft vocabulary and `d2t` [D] their target ids.
    """

    d2t: Tensor | None
    lm_head: Tensor | None

    def __init__(self, config: K3DSparkConfig, lm_head: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, d)
        self.context_proj = Linear(config.context_width, d)
        self.context_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(d, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.fc_norm:
            width, eps = config.target_hidden_size, config.rms_norm_eps
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in config.target_layer_ids)
        full = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if full else torch.empty(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.rope = Rope.from_parameters(config.qk_rope_head_dim, config.rope_parameters)
        self._packed_head: LinearMap | None = None
        self.files: tuple[MappedFile, ...] = ()  # that parameters are views of

    @property
    def block_size(self) -> int:
        """K, draft tokens per block."""
        return self.config.block_size

    @property
    def stack(self) -> list[DraftLayer]:
        """`layers`, with their type."""
        return [cast(DraftLayer, layer) for layer in self.layers]

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype, that of the projections."""
        return self.context_proj.weight.dtype

    def pack(self) -> K3DSparkModel:
        """Lay the weights out for inference on a CPU (a second copy; weights must not change afterwards).

        Pages of mapped files are given back on the way, so that there is no second copy of these.
        """
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.pack()
        if self.lm_head is not None:  # the largest first, while nothing else is there twice
            self._packed_head = lay_out(self.lm_head)
            self._give_back([self.lm_head])
        self.context_proj.pack()
        self._give_back(self.context_proj.parameters())
        for layer in self.stack:
            layer.self_attn.pack()
            layer.mlp.pack()
            self._give_back(layer.parameters())
        self.markov_head.pack()
        self._give_back([self.markov_head.markov_w2.weight])
        return self

    def _give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for file in self.files:
                file.give_back(tensor)

    def new_cache(self, block_tokens: int = 4096) -> LatentCache:
        """An empty context cache in this model's dtype and on its device."""
        weight = self.context_proj.weight
        return LatentCache(len(self.layers), self.config.row_width, weight.dtype, weight.device, block_tokens)

    # -- context -------------------------------------------------------------------------------------------------

    def context_features(self, taps: Tensor) -> Tensor:
        """c = RMSNorm(context_proj · taps) [..., d] of taps [..., N·d_target], ascending layer order (spec §A.2)."""
        if taps.shape[-1] != self.config.context_width:
            raise BadInput(
                f"taps are {taps.shape[-1]} wide",
                f"this draft reads {len(self.config.target_layer_ids)} taps of {self.config.target_hidden_size}",
                "check target_layer_ids and target_hidden_size against the target",
            )
        taps = taps.to(self.dtype)
        if self.config.fc_norm:
            parts = taps.split(self.config.target_hidden_size, -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.context_norm(self.context_proj(taps))

    def context_rows(self, taps: Tensor, positions: Tensor) -> Tensor:
        """Rows [L, T, kv_lora_rank + rope] of taps [T, N·d_target] at positions [T]; any chunking gives the same.

        No input_layernorm on this path, and c is the same for every layer (spec §A.3).
        """
        features = self.context_features(taps)
        angles = self._angles(positions)
        return torch.stack([layer.self_attn.context_rows(features, angles) for layer in self.stack])

    # -- block ---------------------------------------------------------------------------------------------------

    def block_hidden(self, caches: Sequence[LatentCache], anchor_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B, K, d] after `final_norm` of blocks that start at anchors [B] at positions [B].

        Slot 0 holds the anchor, the others the mask token; slot k stands at position n + k (clamped to the last
        of the window). The caches are read, never written: block rows do not outlive the block.
        """
        hidden = self.embed_tokens(self._block_ids(anchor_ids))  # [B, K, d]
        angles = self._angles(self._block_positions(positions))
        mask = self._block_mask(hidden.device)
        for index, layer in enumerate(self.stack):
            context = [cache.chunks(index) for cache in caches]
            hidden = hidden + layer.self_attn.absorbed(layer.input_layernorm(hidden), angles, context, mask)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.final_norm(hidden)

    def propose(
        self,
        caches: Sequence[LatentCache],
        anchor_ids: Tensor,
        positions: Tensor,
        sampling: DraftSampling | None = None,
    ) -> Proposal:
        """Draft K tokens for each of B sequences: anchor_ids [B], positions [B] (= length of each cache)."""
        return self.sample(self.block_hidden(caches, anchor_ids, positions), anchor_ids, sampling or DraftSampling())

    def sample(self, hidden: Tensor, anchor_ids: Tensor, sampling: DraftSampling) -> Proposal:
        """The Markov loop over final-normed hidden [B, K, d], left to right (spec §B.2)."""
        base = self.base_logits(hidden)  # [B, K, D]
        candidates = None
        if sampling.candidates is not None and sampling.candidates < base.shape[-1]:
            base, candidates = base.topk(sampling.candidates, -1)  # [B, K, C]
        batch, slots, _ = base.shape
        previous, state = anchor_ids, self.markov_head.start((batch,))
        tokens, embeddings, probs = [], [], []
        for k in range(slots):
            embedded = self.markov_head.markov_w1(previous)  # [B, r]
            feature, state = self.markov_head.step(embedded, hidden[:, k], state)
            logits = base[:, k] + self.markov_head.bias(feature, None if candidates is None else candidates[:, k])
            if sampling.greedy:
                column = logits.argmax(-1)
            else:
                column, q = _draw(logits, sampling, k)
                probs.append(q)
            index = column if candidates is None else candidates[:, k].gather(-1, column[:, None])[:, 0]
            previous = index if self.d2t is None else self.d2t[index]
            tokens.append(previous)
            embeddings.append(embedded)
        ids = candidates
        if self.d2t is not None:
            ids = self.d2t if candidates is None else self.d2t[candidates]
        return Proposal(
            tokens=torch.stack(tokens, 1),
            confidence=self.confidence(hidden, torch.stack(embeddings, 1)),
            probs=torch.stack(probs, 1) if probs else None,
            token_ids=ids if probs else None,
        )

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U = lm_head · ĥ in fp32 [..., D], no scale and no cap."""
        if self.lm_head is None:
            raise BadInput(
                "this draft has no lm_head",
                "tie_word_embeddings is false and neither lm_head.safetensors nor a target's head was given",
                "put lm_head.safetensors beside model.safetensors, or pass the target's unembedding",
            )
        logits = self._packed_head(hidden) if self._packed_head else nn.functional.linear(hidden, self.lm_head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def confidence(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Confidence logits [B, K] fp32; zeros (σ = ½) for a draft without the head."""
        if self.confidence_head is None:
            return torch.zeros(hidden.shape[:-1], device=hidden.device)
        logits: Tensor = self.confidence_head(hidden, embedded)
        return logits

    # -- training ------------------------------------------------------------------------------------------------

    def training_hidden(self, taps: Tensor, anchor_ids: Tensor, anchors: Tensor, visible: Tensor) -> Tensor:
        """Final-normed hidden [N, A, K, d] of A blocks in each of N sequences, expanded form, with gradients.

        taps [N, S, N_taps·d_target] at positions 0 … S−1; anchors [N, A] positions with token ids anchor_ids
        [N, A]; visible bool [N, A, S]: the context rows a block may read (j < its anchor). Blocks never see
        each other (spec §F.1).
        """
        features = self.context_features(taps)
        context_angles = self._angles(torch.arange(taps.shape[1], device=taps.device))
        hidden = self.embed_tokens(self._block_ids(anchor_ids))  # [N, A, K, d]
        angles = self._angles(self._block_positions(anchors))
        mask = self._block_mask(hidden.device)
        for layer in self.stack:
            rows = layer.self_attn.context_rows(features, context_angles)  # [N, S, W]
            normed = layer.input_layernorm(hidden)
            hidden = hidden + layer.self_attn.expanded(normed, angles, rows, visible, mask)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.final_norm(hidden)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _block_ids(self, anchor_ids: Tensor) -> Tensor:
        masks = anchor_ids.new_full((*anchor_ids.shape, self.block_size - 1), self.config.mask_token_id)
        return torch.cat([anchor_ids[..., None], masks], -1)

    def _block_positions(self, positions: Tensor) -> Tensor:
        slots = torch.arange(self.block_size, device=positions.device)
        return (positions[..., None] + slots).clamp(max=self.config.max_position_embeddings - 1)

    def _block_mask(self, device: torch.device) -> Tensor | None:
        if not self.config.block_causal:
            return None
        return torch.ones(self.block_size, self.block_size, dtype=torch.bool, device=device).tril()

    def _angles(self, positions: Tensor) -> Angles:
        # fp32 angles like public engines; fp64 models (tests) get fp64 ones.
        return self.rope.angles(positions, torch.promote_types(self.dtype, torch.float32))


def _draw(logits: Tensor, sampling: DraftSampling, slot: int) -> tuple[Tensor, Tensor]:
    """One column per row by inverse CDF from the same fp32 tensor that verification will see."""
    assert sampling.temperature is not None
    assert sampling.uniforms is not None
    cold = sampling.temperature < 1e-5
    probs = (logits / sampling.temperature.clamp(min=1e-5)[:, None]).softmax(-1)
    one_hot = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
    probs = torch.where(cold[:, None], one_hot, probs)
    # The sum runs in fp64 where the device has it: in fp32 rare tokens would be drawn a little too often or too rarely.
    wide = torch.float64 if probs.device.type in ("cpu", "cuda") else probs.dtype
    cumulative = probs.to(wide).cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could draw a column of probability zero at the end.
    threshold = torch.minimum(
        sampling.uniforms[:, slot, None].to(cumulative) * total, total.nextafter(torch.zeros_like(total))
    )
    return (cumulative <= threshold).sum(-1), probs
