"""The layers of a Llama-family model over our own kernels, where these can be had: no tiles, no padding.

Every kernel treats a row by itself (`model/native`), so a row's bits do not depend on its call by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from k3dspark.model import native
from k3dspark.model.native import NativeLinear
from k3dspark.model.packed import PackedLinear
from k3dspark.target.attention import KeyValueCache
from k3dspark.target.layer import PackedLayer, RmsNorm, padded_head
from k3dspark.target.weights import LlamaShape

SLICE_ROWS = 512  # that pass through all layers together: bounds the memory of a long prompt
POINTER_BYTES = 8


class FusedLayers:
    """Runs hidden rows through all layers, in place."""

    def __init__(self, layers: Sequence[PackedLayer], shape: LlamaShape, rotations: torch.Tensor, chunk: int) -> None:
        self._kernels = native.kernels()
        self._layers = tuple(_Layer(layer) for layer in layers)
        self._shape, self._chunk = shape, chunk
        self._rotations = torch.view_as_real(rotations).contiguous()  # [max_positions, head_dim / 2, 2]
        self._head_dim = padded_head(shape.head_dim)
        self._floor = shape.hidden_size * shape.rms_norm_eps

    def run(
        self,
        hidden: torch.Tensor,
        caches: Sequence[KeyValueCache],
        positions: torch.Tensor,
        after: Callable[[int, slice, torch.Tensor], None],
    ) -> None:
        """hidden [R, d] at positions [R] of the sequences with these caches, one a row; keys and values are stored.

        `after(layer, rows, hidden of these rows)` is called after each layer. Rows of a sequence stand together, in
        order. Room in the caches is the caller's business.
        """
        for first in range(0, len(hidden), SLICE_ROWS):
            rows = slice(first, min(first + SLICE_ROWS, len(hidden)))
            self._run(hidden[rows], caches[rows], positions[rows], partial(_with_rows, after, rows))

    def _run(
        self,
        hidden: torch.Tensor,
        caches: Sequence[KeyValueCache],
        positions: torch.Tensor,
        after: Callable[[int, torch.Tensor], None],
    ) -> None:
        kernels, shape, head_dim, threads = self._kernels, self._shape, self._head_dim, torch.get_num_threads()
        rows, d, heads, kv_heads = len(hidden), shape.hidden_size, shape.heads, shape.kv_heads
        unit = torch.empty(rows, d)
        qkv = torch.empty(rows, (heads + 2 * kv_heads) * head_dim)
        attended = torch.empty(rows, heads * head_dim)
        both, inner = torch.empty(rows, 2 * shape.intermediate_size), torch.empty(rows, shape.intermediate_size)
        keys, values = (_addresses([getattr(cache, name) for cache in caches]) for name in ("keys", "values"))
        rotations, places, scale = self._rotations.data_ptr(), positions.data_ptr(), shape.head_dim**-0.5
        h, u, q, a, b, i = (t.data_ptr() for t in (hidden, unit, qkv, attended, both, inner))
        for index, layer in enumerate(self._layers):
            mine = index * rows * POINTER_BYTES
            k, v = keys.data_ptr() + mine, values.data_ptr() + mine
            kernels.norm(h, rows, d, 1, d, layer.into_attention, self._floor, u, d, threads)
            layer.qkv.run(unit, qkv)
            for norm, first, count in ((layer.q_norm, 0, heads), (layer.k_norm, heads, kv_heads)):
                if norm is not None:
                    at, gain = q + 4 * first * head_dim, norm.weight.data_ptr()
                    stride = qkv.shape[1]
                    kernels.norm(at, rows, stride, count, head_dim, gain, norm.floor, at, stride, threads)
            kernels.store(q, rows, heads, kv_heads, head_dim, rotations, places, k, v, self._chunk, threads)
            kernels.attend(q, rows, heads, kv_heads, head_dim, places, k, v, self._chunk, scale, a, threads)
            layer.out.run(attended, hidden, onto=True)
            kernels.norm(h, rows, d, 1, d, layer.into_mlp, self._floor, u, d, threads)
            layer.gate_up.run(unit, both)
            kernels.gate(b, rows, shape.intermediate_size, i, threads)
            layer.down.run(inner, hidden, onto=True)
            after(index, hidden)

    @staticmethod
    def product(linear: PackedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """x [R, in] → y [R, out]."""
        _kernel_of(linear.native).run(x.contiguous(), y)

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """`norm` of rows [R, d]."""
        x = x.contiguous()
        return native.norm(x, norm.weight, norm.floor)


def _with_rows(
    after: Callable[[int, slice, torch.Tensor], None], rows: slice, index: int, hidden: torch.Tensor
) -> None:
    after(index, rows, hidden)


class _Layer:
    """A `PackedLayer` as the kernels want it."""

    def __init__(self, layer: PackedLayer) -> None:
        self.qkv, self.out, self.gate_up, self.down = (
            _kernel_of(m.native) for m in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        self.q_norm, self.k_norm = layer.q_norm, layer.k_norm
        self._held = layer.gains  # their addresses are below
        gains = [gain.data_ptr() for gain in layer.gains] if layer.gains else [0, 0]
        self.into_attention, self.into_mlp = gains


def _kernel_of(linear: NativeLinear | None) -> NativeLinear:
    assert linear is not None
    return linear


def _addresses(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [layers, R]: where each layer of each row's cache [layers, …] begins."""
    layers = torch.arange(caches[0].shape[0])[:, None]
    bases = torch.tensor([cache.data_ptr() for cache in caches])
    steps = torch.tensor([cache.stride(0) * cache.element_size() for cache in caches])
    return (bases + layers * steps).contiguous()
