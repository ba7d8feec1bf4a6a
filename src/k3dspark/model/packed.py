"""A linear map in the fastest form this CPU has, always run through one fixed number of rows when asked to."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def native_bf16() -> bool:
    """True when oneDNN multiplies bfloat16 in hardware here (AVX512-BF16 or AMX); emulation is slower than fp32."""
    try:
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return bool(units and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # private probes: absent in some builds
        return False


def can_prepack(dtype: torch.dtype) -> bool:
    """True when oneDNN's prepacked linear exists in this build and serves this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and native_bf16())


class PackedLinear:
    """y = x Wᵀ + b with W [out, in] laid out once for oneDNN, or plain `F.linear` where that is not possible.

    A row of the result depends on the number of rows in the call (kernels are chosen by shape) but not on what the
    other rows hold: callers that need the same bits always pass the same number of rows. `tile_rows` is that number,
    or the usual one: a few rows then cost little more than one.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, tile_rows: int = 8, prepack: bool = True
    ) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        self.bias = bias
        self.packed = prepack and weight.device.type == "cpu" and can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, tile_rows) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        # `.default`: without it every call searches the overloads, which a small model feels.
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(flat, self._weight, self.bias, "none", [], "")
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
