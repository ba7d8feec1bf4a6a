"""Kernels for a few rows of a Llama-like forward (*.cpp), compiled for this CPU on first use and kept in the cache.

Without a C++ compiler everything runs through PyTorch's kernels instead; `reason()` says why. `K3DSPARK_NATIVE=0`
turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3dspark.checkpoint.cache import built_once, cache_root
from k3dspark.errors import BadInput

SOURCES = Path(__file__).parent
LIBRARY = "kernels.so"
NEEDED_BYTES = 1_000_000
COMPILE_SECONDS = 120
WEIGHTS = (torch.float32, torch.bfloat16, torch.int8)

Kernel = Callable[..., int]

POINTER, COUNT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "linear": (POINTER, COUNT, COUNT, POINTER, COUNT, COUNT, POINTER, POINTER, POINTER, COUNT, COUNT, COUNT),
    "norm": (POINTER, COUNT, COUNT, COUNT, COUNT, POINTER, FLOAT, POINTER, COUNT, COUNT),
    "gate": (POINTER, COUNT, COUNT, POINTER, COUNT),
    "store": (POINTER, COUNT, COUNT, COUNT, COUNT, POINTER, POINTER, POINTER, POINTER, COUNT, COUNT),
    "attend": (
        POINTER, COUNT, COUNT, COUNT, COUNT, POINTER, POINTER, POINTER, COUNT, FLOAT, POINTER, COUNT,
    ),
    "latent": (
        POINTER, POINTER, COUNT, POINTER, FLOAT, POINTER, POINTER, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT,
        POINTER, POINTER, FLOAT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The compiled functions; what they take and do is said above each in its source."""

    linear: Kernel
    norm: Kernel
    gate: Kernel
    store: Kernel
    attend: Kernel
    latent: Kernel


def available() -> bool:
    """True when the kernels are, or can be, compiled here; the first call may take some seconds."""
    return _loaded()[0] is not None


def kernels() -> Kernels:
    """The kernels. Raises `RuntimeError` when they are not available."""
    found, why = _loaded()
    if found is None:
        raise RuntimeError(why)
    return found


def reason() -> str:
    """Why the kernels are not available; empty when they are."""
    return _loaded()[1]


def norm(x: Tensor, gain: Tensor, floor: float) -> Tensor:
    """x · gain / sqrt(Σx² + floor) over the last dimension of fp32 x; gain fp32."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    kernels().norm(
        x.data_ptr(), rows, width, 1, width, gain.data_ptr(), floor, y.data_ptr(), width, torch.get_num_threads()
    )
    return y


def gate(both: Tensor) -> Tensor:
    """silu(gate) · up for fp32 [..., gate | up]."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    y = torch.empty(*both.shape[:-1], width)
    kernels().gate(both.data_ptr(), both.numel() // (2 * width), width, y.data_ptr(), torch.get_num_threads())
    return y


class NativeLinear:
    """y = x Wᵀ · scale + b, summed in fp32; weights [out_i, in], stacked along `out`, stay where and as they are.

    A row's bits depend on that row alone. Weights are fp32, bfloat16, or int8 with `scale` [out] fp32.
    """

    def __init__(self, *weights: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> None:
        self._kernel = kernels().linear
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        for weight in weights:
            if weight.dtype not in WEIGHTS or weight.device.type != "cpu" or weight.shape[1] != self.in_features:
                raise ValueError(f"no kernel for {weight.dtype} [{', '.join(map(str, weight.shape))}]")
        self._held = [weight.detach().contiguous() for weight in weights]
        self._scale, self._bias = (None if t is None else t.detach().float().contiguous() for t in (scale, bias))
        self._parts, done = [], 0
        for weight in self._held:
            offsets = tuple(0 if t is None else t.data_ptr() + 4 * done for t in (self._scale, self._bias))
            self._parts.append((weight.data_ptr(), weight.element_size(), len(weight), *offsets, 4 * done))
            done += len(weight)

    def run(self, x: Tensor, y: Tensor, onto: bool = False) -> None:
        """x [rows, in] → y [rows, out], both fp32 and contiguous; `onto` adds to what y holds."""
        rows, source, target, threads = x.shape[0], x.data_ptr(), y.data_ptr(), torch.get_num_threads()
        for weight, size, columns, scale, bias, offset in self._parts:
            if self._kernel(
                source, rows, self.in_features, weight, size, columns, scale, bias,
                target + offset, self.out_features, onto, threads,
            ):  # fmt: skip
                raise MemoryError(f"no memory for {rows} rows of {self.in_features} numbers")

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out] in the dtype of x."""
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if flat.dtype != torch.float32 or not flat.is_contiguous():
            flat = flat.float().contiguous()
        y = torch.empty(flat.shape[0], self.out_features)
        self.run(flat, y)
        if x.dtype != torch.float32:
            y = y.to(x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)


@functools.cache
def _loaded() -> tuple[Kernels | None, str]:
    """The kernels and "", or None and the reason."""
    if os.environ.get("K3DSPARK_NATIVE", "1") == "0":
        return None, "K3DSPARK_NATIVE=0"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler on the path (Debian, Ubuntu: apt-get install g++)"
    options = ["-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", *_tuning()]
    try:
        sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
        contents = [path.read_bytes() for path in sources]
        key = hashlib.sha256(repr((contents, options, _stamp(compiler), _processor())).encode())
        directory = cache_root() / f"native-{key.hexdigest()[:16]}"

        def build(temporary: Path) -> None:
            units = [str(path) for path in sources if path.suffix == ".cpp"]
            command = [compiler, *options, "-o", str(temporary / LIBRARY), *units]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                raise RuntimeError(f"{compiler} cannot compile the kernels: {lines[0]}")

        library = ctypes.CDLL(str(built_once(directory, build, NEEDED_BYTES, _say) / LIBRARY))
    except (BadInput, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, str(error)
    functions = {}
    for name, arguments in SIGNATURES.items():
        functions[name] = getattr(library, f"k3dspark_{name}")
        functions[name].argtypes = arguments
        functions[name].restype = ctypes.c_int if name == "linear" else None
    found = Kernels(**functions)
    wrong = _fault(found.linear)
    return (None, wrong) if wrong else (found, "")


def _fault(kernel: Kernel) -> str:
    """What is wrong with the compiled kernel here, or "": it must add up, and treat a row alike in any company."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 50, generator=generator)
    whole = torch.randint(-127, 128, (19, 50), generator=generator, dtype=torch.int8)
    for weight in (whole, whole.float(), whole.bfloat16()):
        y = torch.empty(9, 19)
        alone = torch.empty(1, 19)
        for rows, out in ((x, y), (x[8:], alone)):
            size = weight.element_size()
            kernel(rows.data_ptr(), len(rows), 50, weight.data_ptr(), size, 19, 0, 0, out.data_ptr(), 19, 0, 1)
        if not torch.allclose(y, x @ whole.float().T, rtol=1e-4, atol=1e-2) or not torch.equal(y[8:], alone):
            return f"the compiled kernel gives wrong products of {weight.dtype} on this processor"
    return ""


def _tuning() -> list[str]:
    if platform.machine() in ("aarch64", "arm64"):
        return ["-mcpu=native"]
    # Multiplications and additions are fused where the source says so: a loop's end would else differ from its middle.
    return ["-march=native", "-ffp-contract=off"]


def _stamp(compiler: str) -> tuple[str, int, int]:
    """Tells one release of a compiler from another, without running it."""
    path = Path(compiler).resolve()
    facts = path.stat()
    return str(path), facts.st_size, facts.st_mtime_ns


def _processor() -> str:
    """What the machine code depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.machine() + platform.processor() + platform.node()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
