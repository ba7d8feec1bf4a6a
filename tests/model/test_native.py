"""The compiled matrix kernel: right products, one row's bits in any company, and a way on without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.model import native
from k3dspark.model.native import NativeLinear
from k3dspark.model.packed import PackedLinear, narrowest, quantised

needs_kernel = pytest.mark.skipif(not native.available(), reason=f"no kernel here: {native.reason()}")
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def weights(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(0, 70), width=st.integers(1, 70), outputs=st.integers(1, 110))
def test_products_are_those_of_float64(dtype: torch.dtype, rows: int, width: int, outputs: int) -> None:
    weight, x = weights(dtype, outputs, width), inputs(rows, width)
    expected = x.double() @ weight.double().T
    bound = 1e-6 * (x.double().abs() @ weight.double().abs().T)  # of the sum of magnitudes: width · 2^-24 at most
    assert ((NativeLinear(weight)(x).double() - expected).abs() <= bound).all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 577, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, width: int, threads: int) -> None:
    linear, x, before = NativeLinear(weights(dtype, 101, width)), inputs(150, width), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = linear(x)
        for count in (1, 2, 3, 4, 5, 7, 8, 63, 64, 65):
            for start in (0, 1, 70):
                assert torch.equal(linear(x[start : start + count]), whole[start : start + count])
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_scale_bias_and_stacked_weights_go_to_their_columns() -> None:
    first, second = weights(torch.int8, 5, 33), weights(torch.int8, 50, 33, seed=2)
    scale, bias, x = torch.rand(55) + 0.5, torch.randn(55), inputs(3, 4, 33)
    y = NativeLinear(first, second, scale=scale, bias=bias)(x)
    stacked = torch.cat([first, second]).float() * scale[:, None]
    torch.testing.assert_close(y, x @ stacked.T + bias, rtol=1e-5, atol=1e-3)


@needs_kernel
def test_input_of_another_dtype_or_order_is_taken_and_given_back() -> None:
    linear, x = NativeLinear(weights(torch.bfloat16, 8, 24)), inputs(24, 6).t()
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert linear(x.bfloat16()).dtype == torch.bfloat16


def test_weights_that_bfloat16_holds_are_kept_in_it() -> None:
    exact = torch.randn(8, 8).bfloat16().float()
    assert narrowest(exact).dtype == torch.bfloat16
    assert narrowest(exact + 2**-20).dtype == torch.float32


def test_rounding_to_eight_bits_errs_by_half_a_step_of_its_row() -> None:
    weight = torch.randn(7, 50) * torch.logspace(-3, 3, 7)[:, None]
    weight[3] = 0
    rounded, scale = quantised(weight)
    steps = weight.abs().amax(-1) / 127
    assert ((rounded * scale[:, None] - weight).abs() <= steps[:, None] * 0.5001).all()
    assert int(rounded.abs().max()) == 127


@needs_kernel
def test_int8_is_the_same_function_with_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(40, 64), inputs(8, 64)
    with_kernel = PackedLinear(weight, int8=True)(x)
    monkeypatch.setattr(native, "available", lambda: False)
    torch.testing.assert_close(PackedLinear(weight, int8=True)(x), with_kernel, rtol=1e-4, atol=1e-4)


def loaded(tmp_path: Path, **variables: str) -> str:
    """What a new process says about the kernel."""
    program = "import k3dspark.model.native as n; print(n.available(), n.reason())"
    environment = os.environ | {"K3DSPARK_CACHE": str(tmp_path)} | variables
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_without_a_compiler_the_reason_names_the_remedy(tmp_path: Path) -> None:
    told = loaded(tmp_path, PATH=str(tmp_path), CXX="")
    assert told.startswith("False no C++ compiler")
    assert "g++" in told


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'cannot execute cc1plus' >&2\nexit 1\n")
    compiler.chmod(0o755)
    told = loaded(tmp_path, PATH=f"{compiler.parent}:/bin:/usr/bin", CXX=str(compiler))
    assert told == f"False {compiler} cannot compile the kernels: cannot execute cc1plus"
    assert not list(tmp_path.glob("native-*"))


def test_a_kernel_that_multiplies_wrongly_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "sources"
    wrong.mkdir()
    for path in native.SOURCES.iterdir():
        if path.suffix in (".cpp", ".h"):
            (wrong / path.name).write_bytes(path.read_bytes())
    source = (wrong / "vector.h").read_text(encoding="utf-8")
    broken = source.replace("const Four two = four +", "const Four two = four -")
    assert broken != source
    (wrong / "vector.h").write_text(broken, encoding="utf-8")
    program = (
        "import pathlib, k3dspark.model.native as n\n"
        f"n.SOURCES = pathlib.Path({str(wrong)!r})\n"
        "print(n.available(), n.reason())"
    )
    environment = os.environ | {"K3DSPARK_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False ")
    if native.available():
        assert "wrong products" in done.stdout
