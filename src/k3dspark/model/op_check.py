"""`check_operators`: each operator that the draft needs, on the user's device in serving precision, against fp32.

An operator has the plain PyTorch form that this project runs (`ops.py` where it is one of ours) and, on some devices,
a fused form that serving engines prefer. The first form that runs and is right is the one reported; forms before it
that are missing or wrong are the problem, and the local form stands in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from k3dspark.checkpoint.published import published_config
from k3dspark.model.ops import attend_latent, rms_norm, rotate_interleaved
from k3dspark.model.rope import Rope

# Largest error over the largest true value. bfloat16 keeps 8 bits: half a unit is 2e-3, a chain of operators some.
TOLERANCE_BF16: Final = 1e-2
# For what must stay in fp32: a device that quietly takes TF32 or HF32 errs by 1e-3 here.
TOLERANCE_FP32: Final = 1e-4
ROWS: Final = 8  # one block: the anchor and seven proposals
CONTEXT_ROWS: Final = 4096
HEAD_SLICE: Final = 16_384  # rows of lm_head that are multiplied: all 163,840 would take 4.7 GB in fp32
MINIATURE_WIDTH: Final = 256
REPEATS: Final = 5
TIMING_SECONDS: Final = 1.0  # no further repeat after this: emulated bfloat16 takes seconds a product

Form = Callable[..., Tensor]


@dataclass(frozen=True)
class OperatorResult:
    """`error` is None when no form ran; `problem` names the forms that did not run or were wrong."""

    name: str
    shape: str
    error: float | None
    tolerance: float
    milliseconds: float | None
    implementation: str
    problem: str = ""


@dataclass(frozen=True)
class Operator:
    """Inputs lie on the CPU in serving precision; `fused` forms take the same inputs as `local`."""

    name: str
    shape: str
    tolerance: float
    inputs: tuple[Tensor, ...]
    local: Form
    fused: tuple[tuple[str, Form], ...] = ()


def check_operators(device: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> list[OperatorResult]:
    """Run every operator on "cpu", "cuda" or "npu" at the shapes of a config; at Kimi K3's without one, or for a
    miniature: its shapes would say nothing about a device."""
    shapes = published_config() if config is None or config["hidden_size"] < MINIATURE_WIDTH else config
    problem = _unusable(device)
    results = []
    for build in operators(shapes, device, seed):
        operator = build()
        if problem:
            results.append(OperatorResult(operator.name, operator.shape, None, operator.tolerance, None, "–", problem))
        else:
            results.append(check_operator(operator, torch.device(device)))
    return results


def check_operator(operator: Operator, device: torch.device) -> OperatorResult:
    """Try the fused forms, then the local one, then the local one on the CPU."""
    truth = operator.local(*(_wide(x) for x in operator.inputs))
    inputs = [x.to(device) for x in operator.inputs]
    forms: list[tuple[str, Form, Sequence[Tensor]]] = [(name, form, inputs) for name, form in operator.fused]
    forms.append(("local", operator.local, inputs))
    if device.type != "cpu":
        forms.append(("local on the CPU", operator.local, operator.inputs))
    problems: list[str] = []
    worst: tuple[float, float, str] | None = None
    for name, form, arguments in forms:
        try:
            with torch.no_grad():
                result = form(*arguments)
                error = relative_error(result, truth)
                milliseconds = _time(form, arguments, device)
        except Exception as fault:  # noqa: BLE001 - whatever a foreign kernel raises is its verdict
            problems.append(f"{name}: {_first_line(fault)}")
            continue
        if error <= operator.tolerance:
            return _result(operator, error, milliseconds, name, problems)
        problems.append(f"{name}: error {error:.1e}")
        worst = worst or (error, milliseconds, name)
    if worst is None:
        return _result(operator, None, None, "–", problems)
    return _result(operator, worst[0], worst[1], worst[2], problems)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """max |result − truth| / max |truth|; for indices 0 or 1; infinite for another shape or NaN."""
    if result.shape != truth.shape:
        return float("inf")
    if not truth.is_floating_point():
        return float(not torch.equal(result.cpu(), truth))
    difference = (result.cpu().double() - truth.double()).abs().max()
    scale = truth.double().abs().max().clamp(min=1e-30)
    error = float(difference / scale)
    return float("inf") if error != error else error


def _result(
    operator: Operator, error: float | None, milliseconds: float | None, name: str, problems: list[str]
) -> OperatorResult:
    said = "; ".join(problems)
    return OperatorResult(operator.name, operator.shape, error, operator.tolerance, milliseconds, name, said)


def _unusable(device: str) -> str:
    """Why the device cannot be used at all, or ""."""
    if device == "npu":
        try:
            import torch_npu  # noqa: F401 - registers the device
        except Exception as fault:  # noqa: BLE001 - it fails in many ways where CANN is not set up
            return f"torch_npu: {_first_line(fault)}"
        return "" if getattr(torch, "npu").is_available() else "torch sees no NPU"  # noqa: B009 - torch_npu adds it
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0][:160]}" if lines else type(fault).__name__


def _time(form: Form, arguments: Sequence[Tensor], device: torch.device) -> float:
    """Median milliseconds of a call, waited for on the device."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < TIMING_SECONDS * 1000:
        wait()
        start = time.perf_counter()
        form(*arguments)
        wait()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


# -- the operators --------------------------------------------------------------------------------------------------


def operators(config: Mapping[str, Any], device: str, seed: int) -> Iterator[Callable[[], Operator]]:
    """Builders, so that one operator's inputs are freed before the next one's are made."""
    npu = _NpuForms if device == "npu" else None
    d, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    rank, rope_width, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    row, slots, vocabulary = rank + rope_width, ROWS - 1, config["vocab_size"]
    markov, eps = config["markov_rank"], config["rms_norm_eps"]
    context = min(CONTEXT_ROWS, config["max_position_embeddings"])
    scale = (nope + rope_width) ** -0.5
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    rope = Rope.from_parameters(rope_width, config["rope_parameters"])
    last = config["max_position_embeddings"] - 1
    positions = torch.linspace(0, last, ROWS * 64).round().to(torch.int64)

    def norm() -> Operator:
        fused: tuple[tuple[str, Form], ...] = (("torch rms_norm", lambda x, w: F.rms_norm(x, (d,), w, eps)),)
        fused = ((("npu_rms_norm", npu.rms_norm(eps)), *fused)) if npu else fused
        inputs = (normal(ROWS, d), normal(d))
        return Operator("rms_norm", f"[{ROWS}, {d}]", TOLERANCE_BF16, inputs, lambda x, w: rms_norm(x, w, eps), fused)

    def angles() -> Operator:
        # Sines of a million radians: a device with a short range reduction is wrong only at long contexts.
        return Operator(
            "rope_angles",
            f"positions 0 … {last}",
            TOLERANCE_FP32,
            (positions,),
            lambda p: torch.stack(rope.angles(p)),
        )

    def rotate() -> Operator:
        cos, sin = rope.angles(positions[:ROWS])
        fused = (("npu_rotary_mul", npu.rotate),) if npu else ()
        return Operator(
            "rotate_interleaved",
            f"[{ROWS}, {heads}, {rope_width}]",
            TOLERANCE_BF16,
            (normal(ROWS, heads, rope_width), cos[:, None], sin[:, None]),
            rotate_interleaved,
            fused,
        )

    def attention() -> Operator:
        def local(query: Tensor, rows: Tensor, block: Tensor) -> Tensor:
            return attend_latent(query, [rows], block, scale, rank, None)

        def sdpa(query: Tensor, rows: Tensor, block: Tensor) -> Tensor:
            key = torch.cat([rows, block])
            return F.scaled_dot_product_attention(query[None], key[None], key[None, :, :rank], scale=scale)[0]

        return Operator(
            "mla_absorbed",
            f"[{slots}×{heads}, {row}] × [{context}+{slots}, {row}]",
            TOLERANCE_BF16,
            (normal(slots * heads, row), normal(context, row), normal(slots, row)),
            local,
            (("torch scaled_dot_product_attention", sdpa),),
        )

    def absorb() -> Operator:
        return Operator(
            "absorb_einsum",
            f"[{slots}, {heads}, {nope}] × [{heads}, {nope}, {rank}]",
            TOLERANCE_BF16,
            (normal(slots, heads, nope), normal(heads, nope, rank, spread=nope**-0.5)),
            lambda q, up: torch.einsum("khn,hnr->khr", q, up),
        )

    def softmax() -> Operator:
        scores = normal(slots * heads, context + slots, dtype=torch.float32, spread=4.0)
        shape = f"[{slots * heads}, {context + slots}] fp32"
        return Operator("softmax", shape, TOLERANCE_FP32, (scores,), lambda x: x.softmax(-1))

    def silu() -> Operator:
        fused = (("npu_swiglu", npu.silu_mul),) if npu else ()
        inputs = (normal(ROWS, inner), normal(ROWS, inner))
        return Operator("silu_mul", f"[{ROWS}, {inner}]", TOLERANCE_BF16, inputs, lambda g, u: F.silu(g) * u, fused)

    def gemm(name: str, wide: int, out: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Operator]:
        def build() -> Operator:
            fp32 = dtype == torch.float32
            return Operator(
                name,
                f"[{ROWS}, {wide}] × [{wide}, {out}]{' fp32' if fp32 else ''}",
                TOLERANCE_FP32 if fp32 else TOLERANCE_BF16,
                (normal(ROWS, wide, dtype=dtype), normal(out, wide, dtype=dtype, spread=wide**-0.5)),
                F.linear,
            )

        return build

    def gather() -> Operator:
        ids = torch.randint(vocabulary, (ROWS,), generator=generator)
        table = normal(vocabulary, markov)
        return Operator("markov_gather", f"[{vocabulary}, {markov}] rows", 0.0, (ids, table), F.embedding)

    def argmax() -> Operator:
        logits = normal(ROWS, vocabulary, dtype=torch.float32)
        return Operator("argmax", f"[{ROWS}, {vocabulary}] fp32", 0.0, (logits,), lambda x: x.argmax(-1))

    def draw() -> Operator:
        logits = normal(ROWS, vocabulary, dtype=torch.float32)
        shape = f"[{ROWS}, {vocabulary}] fp32"
        return Operator("draw_cumsum", shape, TOLERANCE_FP32, (logits,), lambda x: x.softmax(-1).cumsum(-1))

    yield from (norm, angles, rotate, attention, absorb, softmax, silu)
    yield gemm("gemm_kv_a", d, row)
    yield gemm("gemm_gate", d, inner)
    yield gemm("gemm_down", inner, d)
    yield gemm("gemm_lm_head", d, min(vocabulary, HEAD_SLICE))
    yield gather
    yield gemm("markov_bias", markov, vocabulary, torch.float32)
    yield gemm("confidence", d + markov, 1, torch.float32)
    yield argmax
    yield draw


class _NpuForms:
    """The fused forms of torch_npu, found by name when called: an older one may lack them."""

    @staticmethod
    def rms_norm(eps: float) -> Form:
        def form(x: Tensor, weight: Tensor) -> Tensor:
            import torch_npu

            result: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
            return result

        return form

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch_npu

        # It wants [B, N, S, r] and tables as wide as x, each angle twice.
        tables = [t.repeat_interleave(2, -1).to(x.dtype)[:, None] for t in (cos, sin)]
        result: Tensor = torch_npu.npu_rotary_mul(x[:, :, None], *tables, rotary_mode="interleave")[:, :, 0]
        return result

    @staticmethod
    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        import torch_npu

        result: Tensor = torch_npu.npu_swiglu(torch.cat([gate, up], -1), dim=-1)
        return result
