"""Verification is lossless: exact laws of every verifier, for drafts good, bad and cut (spec D)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.laws import DRAFTS, Model, drafted_paths, pair, proposal_of, round_law
from k3dspark.decoding.verify import Draws, block_thresholds, verify_block, verify_greedy, verify_token
from k3dspark.model.proposal import Proposal

V, K = 3, 3
VERIFIERS = {"block": verify_block, "token": verify_token}


def total_law(verifier: str, kind: str, seed: int, lengths: Sequence[int] | int) -> tuple[torch.Tensor, Model]:
    target, draft, candidates, one_hot = pair(kind, seed)
    drafted = drafted_paths(draft, K)
    sizes = [lengths] * len(drafted) if isinstance(lengths, int) else lengths
    proposal = proposal_of(draft, [path for path, _ in drafted], candidates, one_hot)
    laws = round_law(VERIFIERS[verifier], verifier == "block", target, proposal, draft, sizes)
    return sum(chance * law for (_, chance), law in zip(drafted, laws, strict=True)), target  # type: ignore[return-value]


@pytest.mark.parametrize("length", range(K + 1))
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_output_law_is_the_targets(verifier: str, kind: str, length: int) -> None:
    for seed in range(2):
        law, target = total_law(verifier, kind, seed, length)
        torch.testing.assert_close(law, target.law(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_draft_equal_to_the_target_is_always_accepted(verifier: str) -> None:
    target, draft, _, _ = pair("equal to the target", 0)
    drafted = [path for path, _ in drafted_paths(draft, K)]
    rows = torch.stack([target.rows[path[:i]] for path in drafted for i in range(K + 1)])
    draws = Draws(torch.rand(len(drafted), K, dtype=torch.float64), torch.rand(len(drafted), dtype=torch.float64))
    accepted = VERIFIERS[verifier](rows, proposal_of(draft, drafted), torch.full((len(drafted),), K), draws)
    assert accepted.count.tolist() == [K] * len(drafted)


def worked_example() -> tuple[torch.Tensor, Proposal]:
    """Spec D.4: two symbols, p = (1/3, 2/3) and q = (2/3, 1/3) at every position, blocks 00, 01, 10, 11."""
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    tokens = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    return p.expand(12, 2), Proposal(tokens, torch.zeros(4, 2), q.expand(4, 2, 2))


def test_block_thresholds_of_the_worked_example() -> None:
    weights, thresholds = block_thresholds(*worked_example(), torch.full((4,), 2))
    w = [[1, 1 / 2, 1 / 4], [1, 1 / 2, 1], [1, 1, 1 / 2], [1, 1, 1]]
    h = [[0, 1 / 4], [0, 1], [1, 1 / 2], [1, 1]]
    torch.testing.assert_close(weights, torch.tensor(w, dtype=torch.float64))
    torch.testing.assert_close(thresholds, torch.tensor(h, dtype=torch.float64))


@pytest.mark.parametrize(("verifier", "expected"), [("block", 11 / 9), ("token", 10 / 9)])
def test_expected_accepted_tokens_of_the_worked_example(verifier: str, expected: float) -> None:
    rows, proposal = worked_example()
    _, thresholds = block_thresholds(rows, proposal, torch.full((4,), 2))
    ratio = torch.tensor([1 / 2, 2.0], dtype=torch.float64)[proposal.tokens].clamp(max=1.0)
    limits = thresholds if verifier == "block" else ratio
    chance_of_path = torch.tensor([4 / 9, 2 / 9, 2 / 9, 1 / 9], dtype=torch.float64)
    total = 0.0
    for pattern in product((True, False), repeat=2):
        passed = torch.tensor(pattern)
        uniforms = torch.where(passed, limits * (1 - 1e-9), limits + (1 - limits) * 1e-9)
        accepted = VERIFIERS[verifier](
            rows, proposal, torch.full((4,), 2), Draws(uniforms, torch.full((4,), 0.5, dtype=torch.float64))
        )
        chance = torch.where(passed, limits, 1 - limits).prod(1)
        total += float((chance_of_path * chance * accepted.count).sum())
    assert total == pytest.approx(expected, abs=1e-12)


def test_block_verification_takes_the_longest_passing_prefix_not_the_first_failure() -> None:
    """Path 01 has h = (0, 1): slot 1 can never pass by itself, yet both tokens are accepted (hazard I-30)."""
    rows, proposal = worked_example()
    accepted = verify_block(rows, proposal, torch.full((4,), 2), Draws(torch.full((4, 2), 0.5), torch.full((4,), 0.5)))
    assert accepted.count.tolist() == [0, 2, 1, 2]


def test_block_verification_accepts_at_least_as_many_tokens_as_token_level() -> None:
    for seed in range(10):
        target, draft, _, _ = pair("random", seed)
        drafted = drafted_paths(draft, K)
        proposal = proposal_of(draft, [path for path, _ in drafted])
        rows = torch.stack([target.rows[path[:i]] for path, _ in drafted for i in range(K + 1)])
        _, h = block_thresholds(rows, proposal, torch.full((len(drafted),), K))
        # P(τ ≥ i | x) summed over i, and its counterpart: the product of min(1, p/q).
        block, reach = torch.zeros(len(drafted), dtype=torch.float64), torch.ones(len(drafted), dtype=torch.float64)
        for i in range(K, 0, -1):
            block += i * h[:, i - 1] * reach
            reach = reach * (1 - h[:, i - 1])
        ratios = torch.stack(
            [
                torch.stack([target.rows[path[:i]][path[i]] / draft.rows[path[:i]][path[i]] for i in range(K)])
                for path, _ in drafted
            ]
        )
        token = ratios.clamp(max=1).cumprod(1).sum(1)
        chances = torch.tensor([chance for _, chance in drafted], dtype=torch.float64)
        assert float((chances * block).sum()) >= float((chances * token).sum()) - 1e-12


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rounding_to_fp32_and_equal_distributions_still_give_a_token_with_mass(verifier: str) -> None:
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 50, generator=random).softmax(-1)
    rows[:, 7] = 0.0
    tokens = torch.tensor([[3, 4, 5]])
    proposal = Proposal(tokens, torch.zeros(1, 3), rows[None, :3].clone())
    for u in torch.linspace(0, 1 - 1e-7, 50, dtype=torch.float64):
        draws = Draws(torch.full((1, 3), float(u), dtype=torch.float64), u[None])
        accepted = VERIFIERS[verifier](rows, proposal, torch.tensor([3]), draws)
        assert accepted.next_token.item() != 7


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_ragged_batch_gives_what_each_request_gives_alone(verifier: str) -> None:
    random = torch.Generator().manual_seed(5)
    lengths = torch.tensor([0, 3, 1, 2])
    rows = torch.randn(int((lengths + 1).sum()), V, generator=random, dtype=torch.float64).softmax(-1)
    probs = torch.randn(4, K, V, generator=random, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(0, V, (4, K), generator=random)
    draws = Draws(torch.rand(4, K, generator=random), torch.rand(4, generator=random))
    together = VERIFIERS[verifier](rows, Proposal(tokens, torch.zeros(4, K), probs), lengths, draws)
    first = 0
    for b, length in enumerate(lengths.tolist()):
        alone = VERIFIERS[verifier](
            rows[first : first + length + 1],
            Proposal(tokens[b : b + 1], torch.zeros(1, K), probs[b : b + 1]),
            lengths[b : b + 1],
            Draws(draws.accept[b : b + 1], draws.final[b : b + 1]),
        )
        assert alone.count.item() == together.count[b].item()
        assert alone.next_token.item() == together.next_token[b].item()
        first += length + 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=9, max_size=9)), min_size=1, max_size=5)
)
def test_greedy_accepts_the_common_prefix(requests: list[tuple[int, list[int]]]) -> None:
    lengths = torch.tensor([length for length, _ in requests])
    drafted = torch.tensor([tokens[:4] for _, tokens in requests])
    choices = [tokens[4 : 5 + length] for length, tokens in requests]
    accepted = verify_greedy(
        torch.tensor([t for own in choices for t in own]), Proposal(drafted, torch.zeros(drafted.shape)), lengths
    )
    for b, (length, tokens) in enumerate(requests):
        common = next((i for i in range(length) if tokens[i] != choices[b][i]), length)
        assert accepted.count[b].item() == common
        assert accepted.next_token[b].item() == choices[b][common]
