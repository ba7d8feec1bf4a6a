"""A linear map in the fastest form this CPU has, always run through one fixed number of rows when asked to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3dspark.model import native

INT8_TOP = 127


def native_bf16() -> bool:
    """True when oneDNN multiplies bfloat16 in hardware here (AVX512-BF16 or AMX); emulation is slower than fp32."""
    try:
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return bool(units and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # private probes: absent in some builds
        return False


def fast_bf16() -> bool:
    """True when bfloat16 weights are the fastest on this CPU: by its own units, or widened in our kernel."""
    return native_bf16() or native.available()


def can_prepack(dtype: torch.dtype) -> bool:
    """True when oneDNN's prepacked linear exists in this build and serves this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and native_bf16())


def can_widen(weight: torch.Tensor) -> bool:
    """True when our kernel serves this weight, and no unit of the processor does it better."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return native.available() and not (weight.dtype == torch.bfloat16 and native_bf16())


def narrowest(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bfloat16 if that holds the same numbers, else as it is: half the bytes, the same result."""
    if weight.dtype != torch.float32:
        return weight
    half = weight.to(torch.bfloat16)
    return half if torch.equal(half.float(), weight) else weight


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and scale fp32 [out]: every output's weights rounded to 127 steps of their largest."""
    wide = weight.float()
    scale = (wide.abs().amax(-1) / INT8_TOP).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).round_().to(torch.int8), scale


class PackedLinear:
    """y = x Wᵀ + b with W [out, in] laid out once: for our kernel, else for oneDNN, else plain `F.linear`.

    A row of the result never depends on what the other rows hold. Outside our kernel it does depend on the number of
    rows in the call (kernels are chosen by shape): callers that need the same bits always pass the same number.
    `tile_rows` is that number, or the usual one: a few rows then cost little more than one. `int8` rounds the weights
    as `quantised` does; without our kernel the rounded ones are kept in fp32.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tile_rows: int = 8,
        prepack: bool = True,
        int8: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        self.bias = bias
        self.packed = False
        self.native: native.NativeLinear | None = None  # None: not by our kernel
        widen = prepack and can_widen(weight)
        if int8:
            rounded, scale = quantised(weight)
            if widen:
                self.native = native.NativeLinear(rounded, scale=scale, bias=bias)
                return
            weight = (rounded * scale[:, None]).to(weight.dtype)
        if widen:
            self.native = native.NativeLinear(narrowest(weight), bias=bias)
            return
        self.packed = prepack and weight.device.type == "cpu" and can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, tile_rows) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        if self.native is not None:
            return self.native(x)
        if not self.packed:
            return F.linear(x, self._weight, self.bias)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        # `.default`: without it every call searches the overloads, which a small model feels.
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(flat, self._weight, self.bias, "none", [], "")
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
