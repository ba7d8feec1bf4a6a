"""The training loop: steps, schedule, metrics, evaluation, and checkpoints that resume exactly."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3dspark.errors import BadInput
from k3dspark.model.draft import K3DSparkModel
from k3dspark.training.curves import write_curves
from k3dspark.training.evaluate import replay_greedy
from k3dspark.training.loss import LossWeights, block_loss
from k3dspark.training.muon import Muon
from k3dspark.training.shards import BlockBatch, ShardStore


@dataclass(frozen=True)
class ShortBlocks:
    """A first stage on shorter blocks, distilling: early slots decide the acceptance length, and cost less."""

    steps: int = 0
    block_size: int = 4
    loss: LossWeights = field(default_factory=lambda: LossWeights(ce=0.3, l1=0.0, soft=0.7, confidence=0.1))


@dataclass(frozen=True)
class TrainSettings:
    """Steps, batch, schedule. One step = `sequences` conversations × up to `anchors` blocks, cosine to zero."""

    steps: int = 2000
    sequences: int = 12
    anchors: int = 32
    learning_rate: float = 1e-3
    optimiser: str = "muon"
    weight_decay: float = 0.0  # of matrices and tables, decoupled: each step takes rate x this share of them away
    warm_up: float = 0.04
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    evaluate_every: int = 250
    loss: LossWeights = field(default_factory=LossWeights)
    short: ShortBlocks = field(default_factory=ShortBlocks)
    compute: Literal["float32", "bf16"] = "float32"  # of the network's products; weights and softmaxes stay fp32


class Trainer:
    """Trains one draft on the shards of one directory; everything it needs to go on lies in `out`."""

    def __init__(self, model: K3DSparkModel, store: ShardStore, settings: TrainSettings, out: Path) -> None:
        self.model, self.store, self.settings, self.out = model, store, settings, out
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.step = 0
        self.block_size = model.config.block_size
        self.optimisers = optimisers(model, settings)

    def run(self, report: Callable[[dict[str, Any]], None], until: float = math.inf, evaluate: bool = True) -> None:
        """Train to `settings.steps` (or until the clock `until`), appending metrics to `metrics.jsonl`."""
        self.out.mkdir(parents=True, exist_ok=True)
        batches = self._batches()
        blocks, started = 0, time.perf_counter()
        while self.step < self.settings.steps and time.time() < until:
            batch = next(batches)
            metrics = self._one_step(batch)
            blocks += int(batch.supervised.sum())
            if self.step % 10 == 0:
                elapsed = time.perf_counter() - started
                metrics |= {
                    "step": self.step,
                    "slots_per_second": self.world * blocks / elapsed,
                    "seconds_left": round((self.settings.steps - self.step) * elapsed / 10),
                }
                blocks, started = 0, time.perf_counter()
                self._log(metrics, report)
            if self.step % self.settings.checkpoint_every == 0:
                self.save()
            if evaluate and self.step % self.settings.evaluate_every == 0:
                self._log({"step": self.step, **self.evaluate()}, report)
                self._draw()
                started = time.perf_counter()
        self.model.config.block_size = self.block_size
        self.save()
        if evaluate:
            self._log({"step": self.step, **self.evaluate()}, report)
        self._draw()

    def evaluate(self, limit: int = 60) -> dict[str, Any]:
        """Replayed greedy acceptance on prompts held out by hash."""
        self.model.eval()
        current, self.model.config.block_size = self.model.config.block_size, self.block_size
        result = replay_greedy(self.model, self.store, [s for s in self.store.evaluation if s.greedy][:limit])
        self.model.train()
        self.model.config.block_size = current
        return {
            "eval_acceptance_length": result.acceptance_length,
            "eval_per_slot": [round(x, 4) for x in result.per_slot],
            "eval_rounds": result.rounds,
        }

    def _one_step(self, batch: BlockBatch) -> dict[str, Any]:
        rate = self.settings.learning_rate * _schedule(self.step, self.settings)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.zero_grad(set_to_none=True)
        short = self.settings.short
        weights = short.loss if self.step < short.steps else self.settings.loss
        compute = torch.bfloat16 if self.settings.compute == "bf16" else torch.float32
        terms = block_loss(self.model, batch, weights, compute)
        if not bool(torch.isfinite(terms.total)):
            raise BadInput(
                f"the loss is {float(terms.total)} at step {self.step}", "training diverged", "lower the learning rate"
            )
        terms.total.backward()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        sum_gradients(trainable)
        norm = torch.nn.utils.clip_grad_norm_(trainable, self.settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        # Each process holds its share of the global sums; this one's share times their number stands for the whole.
        return {
            "loss": self.world * float(terms.total.detach()),
            "ce": self.world * float(terms.ce),
            "l1": self.world * float(terms.l1),
            "confidence": self.world * float(terms.confidence),
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "acceptance": [round(x, 4) for x in terms.acceptance.tolist()],
            "matches": [round(x, 4) for x in terms.matches.tolist()],
        }

    def _batches(self) -> Iterator[BlockBatch]:
        """Batch number `step` is the same whether the run was interrupted or not."""
        s = self.settings
        index = 0
        epoch = 0
        while True:
            order = self.store.epoch_order(s.seed + 1000 * epoch, s.sequences)
            for sequences in order:
                if index >= self.step:
                    short = s.short
                    self.model.config.block_size = short.block_size if index < short.steps else self.block_size
                    generator = torch.Generator().manual_seed(s.seed + 7919 * index + self.rank)
                    mine = sequences[self.rank :: self.world]
                    yield self.store.batch(mine, s.anchors, self.model.block_size, generator)
                index += 1
            epoch += 1

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Model, optimiser state and step, written to temporary names and renamed."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        for index, optimiser in enumerate(self.optimisers):
            for number, state in optimiser.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimiser.{index}.{number}.{name}"] = torch.as_tensor(value)
        if self.rank:
            return
        temporary = self.out / "state.safetensors.tmp"
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, temporary, metadata={"step": str(self.step)})
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, self.out / "state.safetensors")

    def resume(self) -> bool:
        """Continue from `out` if a checkpoint is there. Raises `BadInput` when it belongs to another draft."""
        path = self.out / "state.safetensors"
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as handle:
                self.step = int(handle.metadata()["step"])
                stored = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
        except Exception as error:  # safetensors raises its own type, OSError or ValueError by damage
            raise BadInput(f"{path} cannot be read", str(error), "delete it to start again from nothing") from error
        trainable = {f"model.{n}": p for n, p in self.model.named_parameters() if p.requires_grad}
        shapes = {name: tuple(t.shape) for name, t in stored.items() if name.startswith("model.")}
        if shapes != {name: tuple(p.shape) for name, p in trainable.items()}:
            raise BadInput(
                f"{path} is the checkpoint of another draft",
                "its tensors have other names or shapes than the options of this run ask for",
                "give the options it was started with, or another --out",
            )
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(stored[name])
        for index, optimiser in enumerate(self.optimisers):
            states: dict[int, dict[str, Tensor]] = {}
            prefix = f"optimiser.{index}."
            for name in (n for n in stored if n.startswith(prefix)):
                number, key = name.removeprefix(prefix).split(".", 1)
                states.setdefault(int(number), {})[key] = stored[name]
            optimiser.load_state_dict({**optimiser.state_dict(), "state": states})
        return True

    def _log(self, metrics: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        if self.rank:
            return
        with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as handle:
            handle.write(json.dumps(metrics) + "\n")
        report(metrics)

    def _draw(self) -> None:
        """The page of curves; a page that cannot be written must not end a run of hours."""
        if self.rank:
            return
        try:
            write_curves(self.out)
        except BadInput as error:
            warnings.warn(str(error), stacklevel=2)


def sum_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Add up the gradients of all training processes, in one message."""
    if not dist.is_initialized():
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for parameter, part in zip(parameters, flat.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter)


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """Settings as plain JSON data, for the record beside the weights."""
    return asdict(settings)


def _schedule(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then cosine to zero."""
    warm = max(1, round(settings.warm_up * settings.steps))
    if step < warm:
        return (step + 1) / warm
    progress = min((step - warm) / max(settings.steps - warm, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress))


def optimisers(model: K3DSparkModel, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for tables, norms and heads."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trainable if p.dim() == 2 and n.startswith(("layers.", "context_proj"))]
    rest = [p for n, p in trainable if not (p.dim() == 2 and n.startswith(("layers.", "context_proj")))]
    rate = settings.learning_rate
    if settings.optimiser != "muon":
        return [_adamw([*matrices, *rest], settings)]
    return [Muon(matrices, rate, weight_decay=settings.weight_decay), _adamw(rest, settings)]


def _adamw(parameters: list[torch.nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """Norms and biases are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
