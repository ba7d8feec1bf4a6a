"""Exact output laws of a verification round, by enumeration of everything random in it.

The verifiers are black boxes here. For every drafted path, every pattern of passed and failed slots and every cell of
the final draw, uniforms are chosen just inside the region that the formulas of the specification name; the region's
probability is its weight. A verifier whose thresholds or final distribution differ returns another token in some
region, and the law no longer equals the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from k3dspark.decoding.verify import Accepted, Draws, take
from k3dspark.model.proposal import Proposal

Path = tuple[int, ...]
Verifier = Callable[[Tensor, Proposal, Tensor, Draws], Accepted]
NUDGE = 1e-9
DRAFTS = (
    "random",
    "uniform",
    "wrong one-hot",
    "one-hot without probabilities",
    "equal to the target",
    "top 2",
    "top 1",
)


@dataclass(frozen=True)
class Model:
    """Next-token distributions [V] for every prefix of up to `depth` tokens."""

    vocab: int
    depth: int
    rows: Mapping[Path, Tensor]

    def law(self) -> Tensor:
        """Joint law of the first depth+1 tokens, shape [V] * (depth+1)."""
        joint = torch.zeros([self.vocab] * (self.depth + 1), dtype=torch.float64)
        for path in product(range(self.vocab), repeat=self.depth + 1):
            joint[path] = self.chance(path)
        return joint

    def chance(self, path: Path, start: int = 0) -> float:
        """Probability of path[start:] given path[:start]."""
        chance = 1.0
        for i in range(start, len(path)):
            chance *= float(self.rows[path[:i]][path[i]])
        return chance


def paths(vocab: int, most: int) -> list[Path]:
    """Every sequence of 0 … `most` tokens."""
    return [path for length in range(most + 1) for path in product(range(vocab), repeat=length)]


def random_model(vocab: int, depth: int, random: torch.Generator, sharpness: float = 1.5) -> Model:
    def row() -> Tensor:
        return (torch.randn(vocab, generator=random, dtype=torch.float64) * sharpness).softmax(-1)

    return Model(vocab, depth, {path: row() for path in paths(vocab, depth)})


def uniform_model(like: Model) -> Model:
    flat = torch.full((like.vocab,), 1 / like.vocab, dtype=torch.float64)
    return Model(like.vocab, like.depth, dict.fromkeys(like.rows, flat))


def wrong_model(like: Model) -> Model:
    """All its mass on the token that the target likes least."""
    rows = {path: torch.eye(like.vocab, dtype=torch.float64)[row.argmin()] for path, row in like.rows.items()}
    return Model(like.vocab, like.depth, rows)


def truncated_model(like: Model, keep: int) -> Model:
    """The `keep` likeliest tokens of each row, renormalised."""
    rows = {}
    for path, row in like.rows.items():
        kept = torch.zeros_like(row)
        best = row.topk(keep)
        kept[best.indices] = best.values / best.values.sum()
        rows[path] = kept
    return Model(like.vocab, like.depth, rows)


def pair(kind: str, seed: int, vocab: int = 3, depth: int = 3) -> tuple[Model, Model, int | None, bool]:
    """Target, draft as a full table, its number of candidates, and whether it hands over no probabilities."""
    random = torch.Generator().manual_seed(seed)
    target, other = random_model(vocab, depth, random), random_model(vocab, depth, random)
    if kind == "uniform":
        return target, uniform_model(target), None, False
    if kind == "wrong one-hot":
        return target, wrong_model(target), None, False
    if kind == "one-hot without probabilities":
        return target, truncated_model(other, 1), None, True
    if kind == "equal to the target":
        return target, target, None, False
    if kind.startswith("top"):
        keep = int(kind[-1])
        return target, truncated_model(other, keep), keep, False
    return target, other, None, False


def proposal_of(
    draft: Model, drafted: Sequence[Path], candidates: int | None = None, one_hot: bool = False
) -> Proposal:
    """The proposal that `draft` makes when it draws these paths; `candidates` keeps only the columns with most mass."""
    tokens = torch.tensor(drafted)
    confidence = torch.zeros(tokens.shape)
    if one_hot:
        return Proposal(tokens, confidence)
    probs = torch.stack([torch.stack([draft.rows[path[:k]] for k in range(len(path))]) for path in drafted])
    if candidates is None:
        return Proposal(tokens, confidence, probs)
    best = probs.topk(candidates, -1)
    return Proposal(tokens, confidence, best.values, best.indices)


def drafted_paths(draft: Model, slots: int) -> list[tuple[Path, float]]:
    """Every block that the draft can draw, with its probability."""
    every = [(path, draft.chance(path)) for path in product(range(draft.vocab), repeat=slots)]
    return [(path, chance) for path, chance in every if chance > 0]


def round_law(
    verifier: Verifier, block: bool, target: Model, proposal: Proposal, draft: Model, lengths: Sequence[int]
) -> list[Tensor]:
    """Law of the first depth+1 output tokens for each drafted path: one round, then the target by itself."""
    drafted = [tuple(path) for path in proposal.tokens.tolist()]
    pieces = [_regions(block, target, draft, path, length) for path, length in zip(drafted, lengths, strict=True)]
    regions = [region for piece in pieces for region in piece]
    owner = [b for b, piece in enumerate(pieces) for _ in piece]
    rows = torch.stack([target.rows[drafted[b][:i]] for b in owner for i in range(lengths[b] + 1)])
    draws = Draws(
        torch.tensor([r.accept for r in regions], dtype=torch.float64).view(len(regions), -1),
        torch.tensor([r.final for r in regions], dtype=torch.float64),
    )
    accepted = verifier(rows, take(proposal, owner), torch.tensor([lengths[b] for b in owner]), draws)
    laws = [torch.zeros([target.vocab] * (target.depth + 1), dtype=torch.float64) for _ in drafted]
    for b, region, count, token in zip(
        owner, regions, accepted.count.tolist(), accepted.next_token.tolist(), strict=True
    ):
        assert count <= lengths[b]
        done = (*drafted[b][:count], token)
        for rest in product(range(target.vocab), repeat=target.depth + 1 - len(done)):
            laws[b][done + rest] += region.weight * target.chance(done + rest, start=len(done))
    return laws


@dataclass(frozen=True)
class _Region:
    accept: tuple[float, ...]
    final: float
    weight: float


def _regions(block: bool, target: Model, draft: Model, path: Path, length: int) -> list[_Region]:
    """Pieces of the cube of uniforms on which a correct verifier is constant."""
    p = [target.rows[path[:i]] for i in range(length + 1)]
    q = [draft.rows[path[:i]] for i in range(length)]
    ratio = [float(p[i][path[i]] / q[i][path[i]]) for i in range(length)]
    weight = [1.0]
    for r in ratio:
        weight.append(min(1.0, weight[-1] * r))
    residual = [float((weight[i] * p[i] - q[i]).clamp(min=0).sum()) for i in range(length)]
    if block:
        threshold = [
            weight[i]
            if i == length
            else (1.0 if residual[i] + 1 - weight[i] == 0 else residual[i] / (residual[i] + 1 - weight[i]))
            for i in range(1, length + 1)
        ]
    else:
        threshold = [min(1.0, r) for r in ratio]
    regions = []
    for pattern in product((True, False), repeat=length):
        chance = 1.0
        for passed, h in zip(pattern, threshold, strict=True):
            chance *= h if passed else 1 - h
        if chance < 1e-15:  # what rounding leaves of an impossible pattern
            continue
        accept = [
            h * (1 - NUDGE) if passed else h + (1 - h) * NUDGE for passed, h in zip(pattern, threshold, strict=True)
        ]
        accept += [0.5] * (len(path) - length)
        if block:
            count = max((i + 1 for i in range(length) if pattern[i]), default=0)
        else:
            count = next((i for i in range(length) if not pattern[i]), length)
        scale = weight[count] if block else 1.0
        mass = p[count] if count == length else (scale * p[count] - q[count]).clamp(min=0)
        if float(mass.sum()) < 1e-15:
            continue
        upper = (mass / mass.sum()).cumsum(0).tolist()
        for low, high in zip([0.0, *upper], upper, strict=False):
            if high - low > 1e-13:
                # Both ends of the cell: a verifier whose cells lie elsewhere is caught at one of them.
                regions += [
                    _Region(tuple(accept), low + (high - low) * side, chance * (high - low) / 2)
                    for side in (1e-3, 1 - 1e-3)
                ]
    return regions
