"""Where the parts of a Kimi K3 take their tensors from: files, or a mapping in a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tensors:
    """Tensors by name below a prefix, converted to the format the model computes in."""

    read: Callable[[str], Tensor]
    dtype: torch.dtype
    prefix: str = ""

    def under(self, prefix: str) -> Tensors:
        return replace(self, prefix=self.prefix + prefix)

    def get(self, name: str) -> Tensor:
        """In the model's dtype."""
        return self.read(self.prefix + name).to(self.dtype)

    def wide(self, name: str) -> Tensor:
        """In fp32 (fp64 for a model in fp64): gates, decays, router and residual mixing are computed in it."""
        return self.read(self.prefix + name).to(wide_dtype(self.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a model of this dtype accumulates in."""
    return torch.promote_types(dtype, torch.float32)
