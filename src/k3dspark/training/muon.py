"""Muon for the matrices of the layers: momentum, orthogonalised (Jordan et al. 2024), in fp32.

`torch.optim.Muon` orthogonalises in bf16, which a CPU without bf16 units emulates about fifty times slower.
The update is scaled to the root mean square that AdamW's would have, 0.2·lr (Liu et al. 2025, Moonlight).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """For 2-D parameters. With several training processes each orthogonalises its share and broadcasts it."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        iterations: int = 5,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "iterations": iterations, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            # Largest first, dealt out in turn: equal work for every process.
            parameters = sorted(group["params"], key=lambda p: -p.numel())
            for index, parameter in enumerate(parameters):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov
                owner = index % world
                if owner == rank:
                    update = orthogonalise(update, group["iterations"])
                parameter.grad = update  # the gradient's memory is free now; it carries the update
            if world > 1:
                for index, parameter in enumerate(parameters):
                    if parameter.grad is not None:
                        dist.broadcast(parameter.grad, index % world)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = 0.2 * max(parameter.shape) ** 0.5
                    parameter.add_(parameter.grad, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, iterations: int) -> Tensor:
    """Newton–Schulz towards U·Vᵀ of the singular value decomposition (quintic, coefficients of Jordan et al.)."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + torch.addmm(-4.7750 * gram, gram, gram, alpha=2.0315) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).contiguous()
