"""16-bit weights multiplied in fp32: exact products, one row's bits, and what cannot be held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3dspark.model.streamed import SLICE_BYTES, StreamedLinear, can_stream, lay_out

pytestmark = pytest.mark.skipif(
    not can_stream(torch.empty(1, 1, dtype=torch.bfloat16)), reason="this CPU has bf16 units, or torch no FBGEMM"
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 8, 19])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_fp32(rows: int, dtype: torch.dtype) -> None:
    weight, x = random(50, 33, seed=1).to(dtype), random(rows, 33)
    torch.testing.assert_close(StreamedLinear(weight)(x), x @ weight.float().T, atol=1e-5, rtol=1e-5)


def test_weights_far_below_fp16_keep_all_their_digits() -> None:
    """bf16 reaches 2^-126 and fp16 only 2^-24; one-hot inputs give the stored weights back."""
    weight = random(16, 24).mul(2.0 ** torch.arange(-24, 0).float()).bfloat16()
    assert torch.equal(StreamedLinear(weight)(torch.eye(24)).T, weight.float())


@pytest.mark.parametrize("factor", [0.0, 2.0**-90, 2.0**90])
def test_no_magnitude_overflows_or_vanishes(factor: float) -> None:
    weight = (random(16, 24) * factor).bfloat16()
    assert torch.equal(StreamedLinear(weight)(torch.eye(24)).T, weight.float())


def test_stacked_weights_are_one_map_across_slices() -> None:
    columns = 40_000
    slice_rows = SLICE_BYTES // (4 * columns) // 16 * 16
    first, second = random(slice_rows + 5, columns, seed=1).bfloat16(), random(7, columns, seed=2).bfloat16()
    x = random(2, 3, columns)
    expected = x @ torch.cat([first, second]).float().T
    torch.testing.assert_close(lay_out(first, second)(x), expected, atol=1e-2, rtol=1e-4)


def test_a_rows_bits_do_not_depend_on_what_the_others_hold() -> None:
    linear = StreamedLinear(random(64, 48).bfloat16())
    x, y = random(8, 48, seed=3), random(8, 48, seed=4)
    y[5] = x[5]
    assert torch.equal(linear(x)[5], linear(y)[5])


def test_results_have_the_dtype_of_the_input() -> None:
    linear = StreamedLinear(random(16, 16).bfloat16())
    assert linear(random(2, 16).bfloat16()).dtype == torch.bfloat16
    assert linear(random(2, 16)).dtype == torch.float32


def test_wide_weights_are_laid_out_as_before() -> None:
    assert not can_stream(random(4, 4))
