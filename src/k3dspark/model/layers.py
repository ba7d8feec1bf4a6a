"""The small modules every layer is made of: linear map, RMSNorm, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3dspark.model import native
from k3dspark.model.native import NativeLinear
from k3dspark.model.ops import rms_norm
from k3dspark.model.streamed import LinearMap, lay_out


class Linear(nn.Module):
    """A bias-free linear map, weight [out, in]; after `pack`, inference uses the packed copy."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self._packed: LinearMap | None = None

    def pack(self) -> None:
        self._packed = lay_out(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self._packed is None else self._packed(x)


class RMSNorm(nn.Module):
    """Plain weight (not 1 + w), variance in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.gain: Tensor | None = None  # √width · weight, once packed for our kernel

    def pack(self) -> None:
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and native.available():
            self.gain = (weight.detach() * len(weight) ** 0.5).contiguous()

    @property
    def floor(self) -> float:
        return self.eps * len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is not None:
            return native.norm(x, self.gain, self.floor)
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(SiLU(gate x) ⊙ up x). SiLU always: the target's SiTU is not the draft's (spec §A.4)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)
        self._gate_up: LinearMap | None = None

    def pack(self) -> None:
        self._gate_up = lay_out(self.gate_proj.weight, self.up_proj.weight)
        self.down_proj.pack()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self._gate_up, NativeLinear) and x.dtype == torch.float32:
            return self.down_proj(native.gate(self._gate_up(x)))
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self._gate_up is None else self._gate_up(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)
