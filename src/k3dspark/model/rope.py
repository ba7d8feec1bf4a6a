"""Rotary positions with YaRN: frequencies, softmax scale, and angles (spec §A.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def yarn_frequencies(
    dim: int, theta: float, factor: float, original: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """ω [dim/2] in fp64: ω_i = inter_i·ρ_i + ext_i·(1−ρ_i), ρ a ramp between two correction dimensions."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    extrapolated = theta**-exponents
    interpolated = extrapolated / factor

    def correction(beta: float) -> float:
        return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    return interpolated * ramp + extrapolated * (1 - ramp)


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(x) = 0.1·x·ln F + 1 for F > 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    """Frequencies [r/2] and the multiplier μ of the cos/sin table."""

    frequencies: Tensor
    multiplier: float

    @classmethod
    def from_parameters(cls, dim: int, parameters: dict[str, object]) -> Rope:
        """`parameters` is config.json's rope_parameters, complete with rope_theta."""
        theta = float(parameters["rope_theta"])  # type: ignore[arg-type]
        if parameters.get("rope_type", "default") != "yarn":
            exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
            return cls(theta**-exponents, 1.0)

        def number(name: str, default: float) -> float:
            value = parameters.get(name)
            return default if value is None else float(value)  # type: ignore[arg-type]

        factor = number("factor", 1.0)
        frequencies = yarn_frequencies(
            dim,
            theta,
            factor,
            int(number("original_max_position_embeddings", 4096)),
            number("beta_fast", 32.0),
            number("beta_slow", 1.0),
        )
        multiplier = yarn_mscale(factor, number("mscale", 1.0)) / yarn_mscale(factor, number("mscale_all_dim", 0.0))
        return cls(frequencies, multiplier)

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., r/2] of positions [...].

        Angles are formed in fp32 by default: at 2^20 they carry up to 0.05 rad of rounding, but that is what
        public engines compute and what a draft saw in training. fp64 is the exact option.
        """
        frequencies = self.frequencies.to(positions.device, dtype)
        angle = positions.to(dtype)[..., None] * frequencies
        return angle.cos() * self.multiplier, angle.sin() * self.multiplier
