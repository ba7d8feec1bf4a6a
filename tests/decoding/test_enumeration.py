"""The whole table, exactly: every verifier under every schedule, with drafts good, bad, cut and hostile (spec D, E)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from decoding.laws import DRAFTS, Model, drafted_paths, pair, proposal_of, round_law
from decoding.test_schedule import RULES, VERIFIERS, confidences, load, warmed
from k3dspark.decoding.verify import verify_greedy

TOGETHER = [
    ("random", "top 1"),
    ("uniform", "wrong one-hot"),
    ("equal to the target", "uniform"),
    ("one-hot without probabilities", "equal to the target"),
]


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_output_law_is_the_targets_under_every_schedule(verifier: str, rule: str, kind: str) -> None:
    target, draft, candidates, one_hot = pair(kind, seed=3)
    confidence = confidences(draft, torch.Generator().manual_seed(4))
    drafted = drafted_paths(draft, draft.depth)
    lengths = [warmed(rule).lengths(confidence[path][None], load(draft.depth))[0] for path, _ in drafted]
    proposal = proposal_of(draft, [path for path, _ in drafted], candidates, one_hot)
    laws = round_law(VERIFIERS[verifier], verifier == "block", target, proposal, draft, lengths)
    law = sum(chance * law for (_, chance), law in zip(drafted, laws, strict=True))
    torch.testing.assert_close(law, target.law(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_output_is_the_targets_under_every_schedule(rule: str, kind: str) -> None:
    target, draft, candidates, one_hot = pair(kind, seed=3)
    plain: tuple[int, ...] = ()
    while len(plain) <= target.depth:
        plain = (*plain, int(target.rows[plain].argmax()))
    confidence = confidences(draft, torch.Generator().manual_seed(4))
    drafted = [path for path, _ in drafted_paths(draft, draft.depth)]
    lengths = [warmed(rule).lengths(confidence[path][None], load(draft.depth))[0] for path in drafted]
    choice = [target.rows[p[:i]].argmax() for p, n in zip(drafted, lengths, strict=True) for i in range(n + 1)]
    proposal = proposal_of(draft, drafted, candidates, one_hot)
    accepted = verify_greedy(torch.stack(choice), proposal, torch.tensor(lengths))
    for path, count, token in zip(drafted, accepted.count.tolist(), accepted.next_token.tolist(), strict=True):
        assert (*path[:count], token) == plain[: count + 1]


@pytest.mark.parametrize("kinds", TOGETHER, ids=" & ".join)
@pytest.mark.parametrize("rule", ["shared, early stop", "shared, capacity"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_requests_with_unlike_drafts_are_jointly_lossless(verifier: str, rule: str, kinds: tuple[str, str]) -> None:
    """One request's confidence decides how much of the budget is left for the other."""
    vocab, slots = 2, 2
    for seed in range(3):
        pairs = [pair(kind, seed + 10 * r, vocab, slots) for r, kind in enumerate(kinds)]
        random = torch.Generator().manual_seed(seed)
        confidence = [confidences(draft, random) for _, draft, _, _ in pairs]
        drafted = [drafted_paths(draft, slots) for _, draft, _, _ in pairs]
        laws = [laws_by_length(verifier, own) for own in pairs]
        joint = torch.zeros(vocab**3, vocab**3, dtype=torch.float64)
        for (a, (path_a, chance_a)), (b, (path_b, chance_b)) in product(*(enumerate(own) for own in drafted)):
            both = torch.stack([confidence[0][path_a], confidence[1][path_b]])
            lengths = warmed(rule, slots).lengths(both, load(slots, slots))
            law_a, law_b = laws[0][lengths[0]][a], laws[1][lengths[1]][b]
            joint += chance_a * chance_b * torch.outer(law_a.flatten(), law_b.flatten())
        expected = torch.outer(*(target.law().flatten() for target, _, _, _ in pairs))
        torch.testing.assert_close(joint, expected, rtol=0, atol=1e-12)


def laws_by_length(verifier: str, own: tuple[Model, Model, int | None, bool]) -> list[list[torch.Tensor]]:
    """Output law of every drafted path at every verify length."""
    target, draft, candidates, one_hot = own
    drafted = [path for path, _ in drafted_paths(draft, draft.depth)]
    proposal = proposal_of(draft, drafted, candidates, one_hot)
    return [
        round_law(VERIFIERS[verifier], verifier == "block", target, proposal, draft, [length] * len(drafted))
        for length in range(draft.depth + 1)
    ]
