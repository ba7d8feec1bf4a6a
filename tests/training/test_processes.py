"""Several training processes: gradients add up to those of one, errors arrive, nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k3dspark.errors import BadInput, EngineFault
from k3dspark.training.loss import global_sum
from k3dspark.training.processes import run_stage
from k3dspark.training.trainer import sum_gradients


def add_up(rank: int, out: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad = torch.full((3,), 1.0 + rank)
    total = global_sum(torch.tensor(10.0 + rank))
    sum_gradients(parameters)  # the second has no gradient here: it counts as zero
    if rank == 0:
        assert parameters[0].grad is not None
        (out / "sums").write_text(f"{float(total)} {parameters[0].grad.tolist()} {dist.get_world_size()}")


def fail(rank: int, _: Any) -> None:
    if rank == 1:
        raise BadInput("something is wrong", "it was found by process 1", "mend it")
    dist.barrier()


def die(rank: int, _: Any) -> None:
    raise SystemExit(7)


def test_gradients_and_weights_are_summed_over_processes(tmp_path: Path) -> None:
    run_stage(add_up, 2, tmp_path / "rendezvous", tmp_path)
    assert (tmp_path / "sums").read_text() == "21.0 [3.0, 3.0, 3.0] 2"
    assert not (tmp_path / "rendezvous").exists()


def test_an_error_in_a_worker_arrives_as_itself(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="found by process 1"):
        run_stage(fail, 2, tmp_path / "rendezvous", None)


def test_a_worker_that_dies_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="ended early"):
        run_stage(die, 2, tmp_path / "rendezvous", None)


def halve_the_smallest_normal() -> float:
    return float(torch.tensor([torch.finfo(torch.float64).smallest_normal], dtype=torch.float64) / 2)


def test_denormals_are_flushed_in_a_stage_and_not_after_it(tmp_path: Path) -> None:
    seen: list[float] = []

    def stage(_: int) -> None:
        seen.append(halve_the_smallest_normal())
        raise BadInput("something is wrong", "the stage fails", "the caller must go on as it was")

    with pytest.raises(BadInput):
        run_stage(stage, 1, tmp_path / "rendezvous")
    assert seen == [0.0]
    assert halve_the_smallest_normal() > 0.0
