"""Linear maps of the draft; 16-bit weights on a CPU without bf16 units stay 16 bits wide, the products are fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3dspark.model.native import NativeLinear
from k3dspark.model.packed import PackedLinear, can_widen, narrowest, native_bf16

LinearMap = Callable[[Tensor], Tensor]

SLICE_BYTES = 8 << 20  # of fp32 staging: bounds the memory of laying out, and two passes over a slice meet in the cache
TOP = 2.0**15  # weights are scaled to at most this: fp16 then holds every bf16 weight down to 2^-32 of the largest
_ENGINES = ("fbgemm", "x86")


def emulated(weight: Tensor) -> bool:
    """True for 16-bit weights on a CPU without units for them: PyTorch's own products would be slower than fp32."""
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16) and not native_bf16()


def can_stream(weight: Tensor) -> bool:
    """True for 16-bit weights on a CPU that would emulate bf16, when this build of torch has FBGEMM's fp16 product."""
    if not emulated(weight):
        return False
    if torch.backends.quantized.engine not in _ENGINES or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False
    return hasattr(torch.ops.quantized, "linear_prepack_fp16") and hasattr(torch.ops.quantized, "linear_dynamic_fp16")


def lay_out(*weights: Tensor) -> LinearMap:
    """x → x Wᵀ for weights [out_i, in] stacked along `out`, in the fastest form this device has."""
    if all(can_widen(weight) for weight in weights):
        return NativeLinear(*(narrowest(weight) for weight in weights))
    if can_stream(weights[0]):
        return StreamedLinear(*weights)
    return PackedLinear(weights[0] if len(weights) == 1 else torch.cat(weights))


class StreamedLinear:
    """y = x Wᵀ, x and the sum in fp32, y in the dtype of x; each call reads 2 bytes a weight.

    FBGEMM takes weights as fp16. bf16 has fewer digits but a wider range, so the weights are scaled by a power of two,
    exactly, and the result is scaled back. Laying out runs one number at a time and takes about 20 ns for each.
    """

    def __init__(self, *weights: Tensor) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        largest = max(
            (float(part.abs().max()) for w in weights for part in w.split(self._rows()) if len(part)), default=0
        )
        scale = 1.0
        while 0 < largest * scale < TOP / 2:
            scale *= 2
        while largest * scale > TOP:
            scale /= 2
        self._unscale = 1 / scale
        self._slices = [
            (len(part), torch.ops.quantized.linear_prepack_fp16(part.detach().float().mul_(scale), None))
            for weight in weights
            for part in weight.split(self._rows())
            if len(part)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        flat = x.reshape(-1, self.in_features).float()
        y = flat.new_empty(len(flat), self.out_features)
        done = 0
        for count, weight in self._slices:
            y[:, done : done + count] = torch.ops.quantized.linear_dynamic_fp16.default(flat, weight)
            done += count
        return y.mul_(self._unscale).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _rows(self) -> int:
        return max(16, SLICE_BYTES // (4 * self.in_features) // 16 * 16)
