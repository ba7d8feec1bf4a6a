"""The draft network against its formulas, and the hazards of spec §I that concern it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_reference import block_hidden, context, greedy
from k3dspark.errors import BadInput
from k3dspark.model import native
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.proposal import DraftSampling

VOCAB, WIDTH = 50, 24
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 50000.0,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def random_draft(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> K3DSparkModel:
    fields: dict[str, object] = {
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_parameters": YARN,
        "target_hidden_size": WIDTH,
        "target_num_hidden_layers": 9,
        "num_target_layers": 3,
        "target_layer_ids": [1, 4, 7],
        "mask_token_id": VOCAB - 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "block_size": 7,
    }  # fmt: skip
    config = K3DSparkConfig(**(fields | changes))
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(config.draft_vocab_size, WIDTH, generator=random, dtype=torch.float64)
    model = K3DSparkModel(config, lm_head=head.to(dtype)).to(dtype).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            # Norm weights away from 1, so that a norm left out or applied twice shows.
            parameter.copy_(values / parameter.shape[1] ** 0.5 if parameter.dim() == 2 else 1 + 0.3 * values)
        if model.d2t is not None:
            model.d2t = torch.randperm(VOCAB, generator=random)[: config.draft_vocab_size].sort().values
    return model


def random_taps(count: int, seed: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3 * WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hidden_after(model: K3DSparkModel, taps: Tensor, anchor: int, block_tokens: int = 4096) -> Tensor:
    cache = model.new_cache(block_tokens)
    cache.append(model.context_rows(taps, torch.arange(len(taps))))
    return model.block_hidden([cache], torch.tensor([anchor]), torch.tensor([len(taps)]))[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_what_the_expanded_formulas_say(packed: bool, causal: bool) -> None:
    model, taps = random_draft(block_causal=causal), random_taps(11)
    expected = block_hidden(model, taps, 3)
    if packed:
        model.pack()
    torch.testing.assert_close(hidden_after(model, taps, 3), expected, atol=1e-5, rtol=1e-5)


def test_context_rows_are_what_the_formulas_say() -> None:
    model, taps = random_draft(), random_taps(9)
    rows = model.context_rows(taps, torch.arange(9))
    for layer, expected in enumerate(context(model, taps)):
        torch.testing.assert_close(rows[layer], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.reason()}")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(0,), (3, 300), (256, 513)])
def test_our_kernels_attend_as_plain_operators_do(causal: bool, lengths: tuple[int, ...]) -> None:
    widths = {"kv_lora_rank": 64, "qk_nope_head_dim": 20, "v_head_dim": 13}
    long = {"max_position_embeddings": 1024, "rope_parameters": YARN | {"factor": 32.0}}
    model = random_draft(block_causal=causal, **widths, **long)
    caches = [model.new_cache(block_tokens=200) for _ in lengths]  # stretches of a chunk, and chunks
    for cache, length in zip(caches, lengths, strict=True):
        cache.append(model.context_rows(random_taps(length), torch.arange(length)))
    anchors = torch.arange(len(lengths))
    expected = model.block_hidden(caches, anchors, torch.tensor(lengths))
    model.pack()
    assert all(layer.self_attn._lifting is not None for layer in model.stack)
    hidden = model.block_hidden(caches, anchors, torch.tensor(lengths))
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("candidates", [None, 20, VOCAB])
def test_a_greedy_proposal_is_the_markov_loop(packed: bool, candidates: int | None) -> None:
    model, taps = random_draft(dtype=torch.float64 if not packed else torch.float32), random_taps(11)
    taps = taps.to(model.dtype)
    tokens, confidence = greedy(model, block_hidden(model, taps, 3), 3)
    if packed:
        model.pack()
    cache = model.new_cache()
    cache.append(model.context_rows(taps, torch.arange(11)))
    proposal = model.propose([cache], torch.tensor([3]), torch.tensor([11]), DraftSampling(candidates=candidates))
    if candidates in (None, VOCAB):
        assert proposal.tokens[0].tolist() == tokens
        torch.testing.assert_close(
            proposal.confidence[0], torch.tensor(confidence).to(proposal.confidence), atol=1e-4, rtol=0
        )
    else:  # the first slot's best token survives any truncation that keeps the best base logits near it
        assert proposal.tokens.shape == (1, 7)


def test_rows_do_not_depend_on_how_the_context_was_chunked() -> None:
    model, taps = random_draft(dtype=torch.float64), random_taps(30, dtype=torch.float64)
    whole = model.context_rows(taps, torch.arange(30))
    parts = [model.context_rows(taps[a:b], torch.arange(a, b)) for a, b in ((0, 1), (1, 8), (8, 29), (29, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-13, rtol=0)


@pytest.mark.parametrize("block_tokens", [1, 4, 7])
def test_cache_blocks_do_not_change_attention(block_tokens: int) -> None:
    model, taps = random_draft(dtype=torch.float64), random_taps(23, dtype=torch.float64)
    expected = hidden_after(model, taps, 3)
    torch.testing.assert_close(hidden_after(model, taps, 3, block_tokens), expected, atol=1e-12, rtol=0)


def test_a_batch_of_unequal_contexts_gives_what_each_gives_alone() -> None:
    model = random_draft(dtype=torch.float64)
    caches, alone = [], []
    for row, count in enumerate((0, 3, 17)):
        taps = random_taps(count, seed=row, dtype=torch.float64)
        cache = model.new_cache()
        cache.append(model.context_rows(taps, torch.arange(count)))
        caches.append(cache)
        alone.append(hidden_after(model, taps, 10 + row))
    together = model.block_hidden(caches, torch.tensor([10, 11, 12]), torch.tensor([0, 3, 17]))
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-12, rtol=0)
    proposal = model.propose(caches, torch.tensor([10, 11, 12]), torch.tensor([0, 3, 17]))
    single = model.propose(caches[2:], torch.tensor([12]), torch.tensor([17]))
    assert proposal.tokens[2].tolist() == single.tokens[0].tolist()


def test_drafting_leaves_the_cache_as_it_was() -> None:
    model, taps = random_draft(), random_taps(6)
    cache = model.new_cache()
    cache.append(model.context_rows(taps, torch.arange(6)))
    before = [c.clone() for c in cache.chunks(0)]
    model.propose([cache], torch.tensor([3]), torch.tensor([6]))
    assert cache.length == 6
    assert torch.equal(torch.cat(before), torch.cat(cache.chunks(0)))


@pytest.mark.parametrize("causal", [False, True])
def test_slot_zero_sees_the_mask_slots_only_without_a_causal_block(causal: bool) -> None:
    """Hazard 9: a causal mask on a non-causal draft costs most of a token of acceptance length."""
    model, taps = random_draft(block_causal=causal), random_taps(6)
    before = hidden_after(model, taps, 3)[0]
    model.embed_tokens.weight[model.config.mask_token_id] += 1.0
    assert torch.equal(hidden_after(model, taps, 3)[0], before) is causal


def test_block_starts_at_the_anchors_own_position() -> None:
    """Hazard 12: scores depend on distance only, so moving context and block together changes nothing."""
    model, taps = random_draft(dtype=torch.float64), random_taps(6, dtype=torch.float64)
    results = []
    for shift, offset in ((0, 0), (40, 40), (40, 41)):
        cache = model.new_cache()
        cache.append(model.context_rows(taps, torch.arange(6) + shift))
        results.append(model.block_hidden([cache], torch.tensor([3]), torch.tensor([6 + offset])))
    torch.testing.assert_close(results[1], results[0], atol=1e-9, rtol=0)
    assert float((results[2] - results[0]).abs().max()) > 1e-3


def test_positions_are_clamped_at_the_end_of_the_window() -> None:
    model = random_draft()
    cache = model.new_cache()
    hidden = model.block_hidden([cache], torch.tensor([3]), torch.tensor([127]))
    assert bool(hidden.isfinite().all())


def test_taps_are_read_in_ascending_order_at_their_own_place() -> None:
    """Hazard 3: shuffled taps are another context."""
    model, taps = random_draft(), random_taps(6)
    shuffled = taps.view(6, 3, WIDTH)[:, [1, 0, 2]].reshape(6, -1)
    assert float((hidden_after(model, taps, 3) - hidden_after(model, shuffled, 3)).abs().max()) > 1e-2


def test_tiny_inputs_keep_the_configured_epsilon() -> None:
    """Hazard 16: at rms near 1e-3 an epsilon of 1e-6 instead of 1e-5 changes the result by a factor."""
    model, taps = random_draft(), random_taps(4) * 1e-3
    rows = model.context_rows(taps, torch.arange(4))
    torch.testing.assert_close(rows[0], context(model, taps)[0], atol=1e-5, rtol=1e-4)
    model.context_norm.eps = 1e-6
    assert float((model.context_rows(taps, torch.arange(4)) - rows).abs().max()) > 0.1


def test_the_markov_bias_reads_w1_by_the_previous_token_and_writes_by_w2() -> None:
    """Hazards 22 and 23: W1 and W2 have one shape; slot 0's previous token is the anchor."""
    model = random_draft()
    head = model.markov_head
    head.markov_w1.weight.zero_()
    head.markov_w2.weight.zero_()
    head.markov_w1.weight[3, 0] = 1.0
    head.markov_w2.weight[17, 0] = 1000.0
    head.markov_w1.weight[17, 1] = 1.0
    head.markov_w2.weight[8, 1] = 1000.0
    cache = model.new_cache()
    tokens = model.propose([cache], torch.tensor([3]), torch.tensor([0])).tokens[0].tolist()
    assert tokens[:2] == [17, 8]


def test_confidence_does_not_depend_on_the_token_it_judges() -> None:
    """Spec §E.4: the confidence of slot k may use x_1 … x_{k−1}, never x_k."""
    model = random_draft()
    hidden = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([1.0])
    drawn = [
        model.sample(hidden, torch.tensor([3]), DraftSampling(temperature, torch.full((1, 7), u))) for u in (0.01, 0.9)
    ]
    assert drawn[0].tokens[0, 0] != drawn[1].tokens[0, 0]
    assert drawn[0].confidence[0, 0] == drawn[1].confidence[0, 0]
    assert drawn[0].confidence[0, 1] != drawn[1].confidence[0, 1]


def test_confidence_reads_hidden_first_then_the_markov_embedding() -> None:
    """Hazard 33."""
    model, hidden = random_draft(), torch.randn(1, 7, WIDTH)
    assert model.confidence_head is not None
    model.confidence_head.proj.weight.zero_()
    model.confidence_head.proj.weight[0, WIDTH] = 2.0
    proposal = model.sample(hidden, torch.tensor([3]), DraftSampling())
    expected = 2 * model.markov_head.markov_w1.weight[3, 0] + model.confidence_head.proj.bias[0]
    torch.testing.assert_close(proposal.confidence[0, 0], expected)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads_follow_their_formula(kind: str) -> None:
    model, hidden = random_draft(markov_head_type=kind, dtype=torch.float64), torch.randn(7, WIDTH, dtype=torch.float64)
    head, previous, tokens = model.markov_head, 3, []
    state = torch.zeros(5, dtype=torch.float64)
    assert model.lm_head is not None
    for h in hidden:
        e = head.markov_w1.weight[previous]
        if kind == "gated":
            feature = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias) * e
        else:
            z = head.joint_proj.weight @ torch.cat([state, e, h]) + head.joint_proj.bias
            gate = torch.sigmoid(z[:5])
            state = gate * state + (1 - gate) * torch.tanh(z[5:10])
            feature = torch.tanh(z[10:])
        previous = int((model.lm_head @ h + head.markov_w2.weight @ feature).argmax())
        tokens.append(previous)
    assert model.sample(hidden[None], torch.tensor([3]), DraftSampling()).tokens[0].tolist() == tokens


@pytest.mark.parametrize("candidates", [None, 8])
@pytest.mark.parametrize("draft_vocab", [VOCAB, 30])
def test_reported_probabilities_are_those_tokens_are_drawn_from(candidates: int | None, draft_vocab: int) -> None:
    """Spec §B.3: drawing over a grid of uniforms reproduces q of slot 0, and nothing outside q's support appears."""
    model = random_draft(draft_vocab_size=draft_vocab)
    count = 2000
    hidden = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(1)).expand(count, -1, -1)
    uniforms = torch.rand(count, 7, generator=torch.Generator().manual_seed(2))
    uniforms[:, 0] = (torch.arange(count) + 0.5) / count
    sampling = DraftSampling(torch.full((count,), 3.0), uniforms, candidates)
    proposal = model.sample(hidden, torch.full((count,), 3), sampling)
    q = proposal.dense_probs(VOCAB)
    torch.testing.assert_close(q.sum(-1), torch.ones(count, 7))
    assert float(q.gather(-1, proposal.tokens[..., None]).min()) > 0
    drawn = torch.bincount(proposal.tokens[:, 0], minlength=VOCAB) / count
    torch.testing.assert_close(drawn, q[0, 0], atol=1.5 / count, rtol=0)
    if candidates is not None:
        assert int((q[0, 0] > 0).sum()) == candidates


def test_rows_of_a_batch_may_mix_greedy_and_sampled() -> None:
    model = random_draft()
    hidden = torch.randn(1, 7, WIDTH).expand(2, -1, -1)
    sampling = DraftSampling(torch.tensor([0.0, 1.0]), torch.full((2, 7), 0.999))
    proposal = model.sample(hidden, torch.tensor([3, 3]), sampling)
    greedy_tokens = model.sample(hidden[:1], torch.tensor([3]), DraftSampling()).tokens[0]
    assert torch.equal(proposal.tokens[0], greedy_tokens)
    assert proposal.probs is not None
    assert float(proposal.probs[0].max(-1).values.min()) == 1.0


def test_a_tap_norm_is_applied_to_every_tap_apart() -> None:
    model, taps = random_draft(fc_norm=True), random_taps(5)
    louder = torch.cat([taps[:, :WIDTH] * 7, taps[:, WIDTH:]], -1)
    rows = model.context_rows(taps, torch.arange(5))
    torch.testing.assert_close(model.context_rows(louder, torch.arange(5)), rows, atol=1e-3, rtol=1e-3)
    assert "fc_norm.2.weight" in model.state_dict()


def test_taps_of_another_target_are_refused() -> None:
    with pytest.raises(BadInput, match="taps are 48 wide"):
        random_draft().context_rows(torch.zeros(2, 2 * WIDTH), torch.arange(2))


def test_a_draft_without_a_head_says_what_is_missing() -> None:
    model = random_draft()
    model.lm_head = None
    with pytest.raises(BadInput, match="lm_head"):
        model.propose([model.new_cache()], torch.tensor([3]), torch.tensor([0]))


def test_published_geometry_has_68_tensors_and_its_parameter_count() -> None:
    with torch.device("meta"):
        model = K3DSparkModel(K3DSparkConfig.published())
    state = model.state_dict()
    assert len(state) == 68
    assert sum(t.numel() for t in state.values()) == 3_562_312_961
    assert tuple(state["layers.4.self_attn.kv_b_proj.weight"].shape) == (16384, 512)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability(uniform: float) -> None:
    model = random_draft()
    assert model.lm_head is not None
    model.lm_head[-5:] = -1000.0  # after softmax: zeros at the end of the vocabulary
    hidden = torch.rand(1, 7, WIDTH) + 0.5
    proposal = model.sample(hidden, torch.tensor([3]), DraftSampling(torch.ones(1), torch.full((1, 7), uniform)))
    assert proposal.probs is not None
    assert float(proposal.probs.gather(-1, proposal.tokens[..., None]).min()) > 0
