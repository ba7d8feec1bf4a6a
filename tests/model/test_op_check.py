"""Operators against fp32: right ones pass, wrong or missing ones fall back, and what cannot run says why."""

from __future__ import annotations

import pytest
import torch

from k3dspark.checkpoint.published import tiny_config
from k3dspark.model import op_check
from k3dspark.model.op_check import Operator, check_operator, check_operators, relative_error

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def miniatures_at_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi K3's shapes take a minute on a processor that emulates bfloat16."""
    monkeypatch.setattr(op_check, "MINIATURE_WIDTH", 0)


def test_every_operator_of_the_draft_is_right_on_this_cpu() -> None:
    results = {result.name: result for result in check_operators("cpu", tiny_config())}
    assert set(results) == {
        "rms_norm",
        "rope_angles",
        "rotate_interleaved",
        "mla_absorbed",
        "absorb_einsum",
        "softmax",
        "silu_mul",
        "gemm_kv_a",
        "gemm_gate",
        "gemm_down",
        "gemm_lm_head",
        "markov_gather",
        "markov_bias",
        "confidence",
        "argmax",
        "draw_cumsum",
    }
    for result in results.values():
        assert result.error is not None
        assert result.error <= result.tolerance, result
        assert result.milliseconds is not None
        assert result.problem == ""


def operator(*fused: object, local: object = torch.sin) -> Operator:
    return Operator("sine", "[8]", 1e-2, (torch.linspace(0, 1, 8),), local, tuple(fused))  # type: ignore[arg-type]


def missing(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel for this device\nwith a long story")


def test_a_fused_form_that_is_right_is_the_one_reported() -> None:
    result = check_operator(operator(("fused", lambda x: x.sin())), CPU)
    assert (result.implementation, result.problem) == ("fused", "")


def test_a_missing_and_a_wrong_fused_form_leave_the_local_one() -> None:
    result = check_operator(operator(("absent", missing), ("wrong", torch.cos)), CPU)
    assert result.implementation == "local"
    assert result.error == 0.0
    assert "absent: NotImplementedError: no kernel for this device;" in result.problem
    assert "wrong: error" in result.problem


def test_an_operator_that_no_form_computes_right_keeps_its_error() -> None:
    good_once = iter([torch.sin])

    def decays(x: torch.Tensor) -> torch.Tensor:
        return next(good_once, torch.cos)(x)  # right for the reference, wrong ever after

    result = check_operator(operator(local=decays), CPU)
    assert result.error is not None
    assert result.error > 1e-2


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_a_device_that_is_not_there_fails_every_operator_with_the_reason(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    results = check_operators(device, tiny_config())
    assert {result.error for result in results} == {None}
    assert all(result.problem for result in results)


def test_errors_are_relative_to_the_largest_value_and_indices_are_right_or_wrong() -> None:
    truth = torch.tensor([0.0, 100.0])
    assert relative_error(truth + 1, truth) == pytest.approx(0.01)
    assert relative_error(torch.full((2,), float("nan")), truth) == float("inf")
    assert relative_error(torch.zeros(3), truth) == float("inf")
    assert relative_error(torch.tensor([1]), torch.tensor([2])) == 1.0
