"""A target in a rotated basis: found by its embedding, undone in the draft's context projection (spec §H.5).

Quantisation with QuaRot turns every hidden state s of the target into Q·s with an orthogonal Q, and its embedding
with it. Its tokens stay the same, but its taps reach the draft rotated.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.layers import RMSNorm

ROWS_PER_COLUMN = 4  # rows that determine the rotation, for each of its columns
NORM_TOLERANCE = 2e-2  # a rotation keeps the norm of a row, up to the rounding of 16-bit weights
FIT_TOLERANCE = 2e-2  # relative error of the rotated rows; unrelated rows miss by 1


def rotation_between(own: Tensor, target: Tensor) -> Tensor | None:
    """The orthogonal Q [d, d] with target ≈ own · Qᵀ, for two embeddings [V, d]; None when they are equal or unrelated.

    Orthogonal Procrustes problem (Schönemann 1966), on rows spread over the vocabulary.
    """
    if own.shape != target.shape or own.data_ptr() == target.data_ptr():
        return None
    rows, width = own.shape
    step = max(1, rows // (ROWS_PER_COLUMN * width))
    mine, theirs = (t.detach()[::step].to(torch.promote_types(t.dtype, torch.float32)) for t in (own, target))
    if mine.shape[0] < width or torch.allclose(mine, theirs, rtol=1e-2, atol=0):
        return None
    norms = mine.norm(dim=-1), theirs.norm(dim=-1)
    if not torch.allclose(*norms, rtol=NORM_TOLERANCE, atol=0):
        return None
    left, _, right = torch.linalg.svd(theirs.T @ mine)
    rotation: Tensor = left @ right
    error = (mine @ rotation.T - theirs).norm() / theirs.norm()
    return rotation if float(error) <= FIT_TOLERANCE else None


def undo_rotation(draft: K3DSparkModel, rotation: Tensor) -> None:
    """Let a draft read taps Q·s as it read s: every tap's columns W of context_proj become W·Qᵀ.

    The draft must have an embedding and a lm_head of its own, for the target's are rotated. With `fc_norm` each tap's
    norm weight w goes into the matrix too, W·diag(w)·Qᵀ, since it does not commute with a rotation. Before `pack`.
    """
    width = draft.config.target_hidden_size
    with torch.no_grad():
        weight = draft.context_proj.weight
        blocks = weight.to(rotation.dtype).split(width, -1)
        if draft.config.fc_norm:
            weights = [cast(RMSNorm, norm).weight for norm in draft.fc_norm]
            blocks = tuple(b * w.to(b.dtype) for b, w in zip(blocks, weights, strict=True))
            for w in weights:
                w.fill_(1.0)
        turned = torch.cat([block @ rotation.T for block in blocks], -1).to(weight.dtype)
        # A tensor of its own: `pack` drops the pages of a mapped one.
        draft.context_proj.weight = nn.Parameter(turned, requires_grad=weight.requires_grad)
