"""Bytes on one device: the draft's weights, its latent cache, workspace and what an engine needs beside them.

Weights and cache rows follow from config.json exactly. Workspace follows from the tensors alive at the widest point of
a pass. `Overhead` is an assumption, stated in the report and open to the user's own measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from k3dspark.checkpoint.fields import value_of
from k3dspark.checkpoint.inventory import EMBEDDING, LM_HEAD, TensorSpec, expected_tensors, lm_head_tensor
from k3dspark.deploy.cache_groups import JoiningCost, TargetLayout, joining_cost
from k3dspark.errors import BadInput

GB: Final = 10**9
Dtype = Literal["bfloat16", "float32", "fp8"]
DTYPE_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}

# Column- or row-parallel in every engine; the rest (low-rank inputs, norms, heads) is whole on each device.
_SPLIT: Final = ("q_b_proj", "kv_b_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", LM_HEAD, EMBEDDING)
# What fp8 checkpoints of such drafts quantise: the matrices of the layers, with one fp32 scale for each output.
_QUANTISED: Final = ("self_attn.", "mlp.")


@dataclass(frozen=True)
class Overhead:
    """What an engine takes beside weights and cache. Assumptions; measure on your devices and pass your own."""

    runtime_bytes: int = int(1.2 * GB)
    """Driver context, streams, compiled operators."""
    graph_bytes: int = int(0.5 * GB)
    """Captured graphs of the draft's pass at a dozen batch sizes."""
    link_buffer_bytes: int = 2 * 800 * 2**20
    """Send and receive buffers of one communicator, HCCL_BUFFSIZE=800; only where tensors are split."""

    def bytes(self, tensor_parallel: int) -> int:
        return self.runtime_bytes + self.graph_bytes + (self.link_buffer_bytes if tensor_parallel > 1 else 0)


@dataclass(frozen=True)
class Wish:
    """What is to be served: contexts and numbers of concurrent sequences to tabulate, dtypes and splits."""

    contexts: tuple[int, ...] = (8192, 32768, 131072, 1048576)
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    devices_gb: tuple[int, ...] = (16, 32, 64)
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    target_tensor_parallel: int = 0
    """The target's, where it differs: it decides how large a block of the joined cache is."""
    prefill_tokens: int = 8192
    utilisation: float = 0.9
    overhead: Overhead = field(default_factory=Overhead)
    shares_embeddings: bool = False
    """The engine aliases the target's embedding and lm_head instead of loading the draft's own."""


@dataclass(frozen=True)
class Cell:
    """Bytes on one device for one context length and number of sequences, and the smallest device that holds them."""

    context: int
    sequences: int
    weights: int
    cache: int
    workspace: int
    overhead: int
    device_gb: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.overhead


@dataclass(frozen=True)
class Room:
    """What one device size can hold: cached tokens in all, and sequences of each context length."""

    device_gb: int
    usable: int
    tokens: int
    sequences: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """Weights on one device under a tensor parallel size."""

    tensor_parallel: int
    weights: int
    possible: bool
    why: str


@dataclass(frozen=True)
class MemoryPlan:
    """The whole answer; every figure in bytes."""

    wish: Wish
    weights: int
    row_bytes: int
    largest_context: int
    cells: tuple[Cell, ...]
    rooms: tuple[Room, ...]
    splits: tuple[Split, ...]
    dtypes: tuple[tuple[str, str, int, int], ...]
    joining: tuple[JoiningCost, ...]
    smallest_gb: int | None
    """The smallest listed device for one sequence of the shortest context."""
    long_gb: int | None
    """The smallest listed device for one sequence of the full context window."""


def plan_memory(config: Mapping[str, Any], wish: Wish, target: TargetLayout | None = None) -> MemoryPlan:
    """Every table of `k3dspark plan` from a config that satisfies `rules.require`; `target` adds what joining its
    cache costs. Raises `BadInput`."""
    _require(config, wish)
    model = DraftMemory(config, wish)
    full = int(config["max_position_embeddings"])
    contexts = tuple(sorted({context for context in wish.contexts if context <= full} | {full}))
    cells = tuple(model.cell(context, sequences) for context in contexts for sequences in wish.concurrency)
    smallest, longest = model.cell(contexts[0], 1), model.cell(full, 1)
    layers = int(config["num_hidden_layers"])
    tokens = value_of(config, "block_size")
    split = wish.target_tensor_parallel or wish.tensor_parallel
    return MemoryPlan(
        wish=wish,
        weights=model.weights(wish.tensor_parallel),
        row_bytes=model.row_bytes,
        largest_context=full,
        cells=cells,
        rooms=tuple(model.room(size, contexts) for size in wish.devices_gb),
        splits=tuple(model.splits()),
        dtypes=tuple(_dtypes(config, wish)),
        joining=tuple(joining_cost(target, layers, tokens, split, n) for n in contexts) if target else (),
        smallest_gb=smallest.device_gb,
        long_gb=longest.device_gb,
    )


class DraftMemory:
    """The draft of one config under one wish."""

    def __init__(self, config: Mapping[str, Any], wish: Wish) -> None:
        self.config, self.wish = config, wish
        specs = {**expected_tensors(config), LM_HEAD: lm_head_tensor(config)}
        if wish.shares_embeddings:
            specs = {name: spec for name, spec in specs.items() if name not in (EMBEDDING, LM_HEAD)}
        self._specs = list(specs.values())
        width = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
        self.row_bytes = int(config["num_hidden_layers"]) * width * DTYPE_BYTES[wish.cache_dtype]

    def weights(self, tensor_parallel: int) -> int:
        """Bytes of the weights on one of `tensor_parallel` devices."""
        return sum(_weight_bytes(spec, self.wish.dtype, tensor_parallel) for spec in self._specs)

    def workspace(self, sequences: int, context: int) -> int:
        """Bytes alive at the widest point: either the taps of a prefill chunk, or the logits of all blocks."""
        config, taps = self.config, value_of(self.config, "num_target_layers") * self.config["target_hidden_size"]
        hidden = int(config["hidden_size"])
        each = DTYPE_BYTES["bfloat16"]
        chunk = min(self.wish.prefill_tokens, context)
        # The taps arrive from the target, are projected, and give one packed row for each layer.
        prefill = chunk * (taps + 2 * hidden) * each + chunk * self.row_bytes
        rows = sequences * value_of(config, "block_size")
        inner = 2 * int(config["intermediate_size"]) // self.wish.tensor_parallel
        # Logits and probabilities in fp32, beside the residual stream and the gate and up halves of one MLP.
        block = rows * (2 * 4 * int(config["vocab_size"]) + (4 * hidden + inner) * each)
        return max(prefill, block)

    def cell(self, context: int, sequences: int) -> Cell:
        wish = self.wish
        parts = {
            "weights": self.weights(wish.tensor_parallel),
            "cache": context * sequences * self.row_bytes,
            "workspace": self.workspace(sequences, context),
            "overhead": wish.overhead.bytes(wish.tensor_parallel),
        }
        total = sum(parts.values())
        fits = [size for size in sorted(wish.devices_gb) if total <= self._usable(size)]
        return Cell(context, sequences, device_gb=fits[0] if fits else None, **parts)

    def room(self, device_gb: int, contexts: Sequence[int]) -> Room:
        fixed = self.weights(self.wish.tensor_parallel) + self.wish.overhead.bytes(self.wish.tensor_parallel)
        usable = self._usable(device_gb)
        left = usable - fixed - self.workspace(1, max(contexts))
        sequences = tuple((context, self._most_sequences(usable - fixed, context)) for context in contexts)
        return Room(device_gb, usable, max(left, 0) // self.row_bytes, sequences)

    def splits(self) -> Iterable[Split]:
        heads, inner = int(self.config["num_attention_heads"]), int(self.config["intermediate_size"])
        for size in (1, 2, 4, 8, 16, 32):
            uneven = [what for n, what in ((heads, f"{heads} heads"), (inner, f"an MLP of {inner}")) if n % size]
            yield Split(size, self.weights(size), not uneven, f"does not divide {' and '.join(uneven)}" * bool(uneven))

    def _most_sequences(self, left: int, context: int) -> int:
        low, high = 0, max(left, 0) // (context * self.row_bytes) if left > 0 else 0
        while low < high:  # workspace grows with the number of sequences, so the answer is below the plain quotient
            middle = (low + high + 1) // 2
            if middle * context * self.row_bytes + self.workspace(middle, context) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _usable(self, device_gb: int) -> int:
        return int(device_gb * GB * self.wish.utilisation)


def _weight_bytes(spec: TensorSpec, dtype: str, tensor_parallel: int) -> int:
    parts = tensor_parallel if any(part in spec.name for part in _SPLIT) else 1
    share = -(-spec.parameters // parts)
    matrix = len(spec.shape) == 2
    if dtype == "fp8":
        if matrix and spec.name.startswith("layers.") and any(part in spec.name for part in _QUANTISED):
            return share + 4 * spec.shape[0]
        return share * DTYPE_BYTES["bfloat16"]
    return share * DTYPE_BYTES[dtype]


def _dtypes(config: Mapping[str, Any], wish: Wish) -> Iterable[tuple[str, str, int, int]]:
    """(weights dtype, cache dtype, bytes of weights, bytes per cached token) of every combination."""
    for dtype in ("bfloat16", "fp8", "float32"):
        for cache in ("bfloat16", "fp8"):
            model = DraftMemory(config, replace(wish, dtype=dtype, cache_dtype=cache))
            yield dtype, cache, model.weights(wish.tensor_parallel), model.row_bytes


def _require(config: Mapping[str, Any], wish: Wish) -> None:
    for name, value in (("--dtype", wish.dtype), ("--cache-dtype", wish.cache_dtype)):
        if value not in DTYPE_BYTES:
            raise BadInput(f"{name} {value} is unknown", f"known are {', '.join(DTYPE_BYTES)}", "pass one of them")
    if not 0.1 <= wish.utilisation <= 1.0:
        raise BadInput(
            f"--utilisation {wish.utilisation} is out of range", "it is the share of a device to use", "pass 0.1 to 1"
        )
    for what, values in (
        ("context", wish.contexts),
        ("concurrency", wish.concurrency),
        ("device size", wish.devices_gb),
    ):
        if not values or min(values) < 1:
            raise BadInput(f"the {what} list is {values}", "it needs positive whole numbers", "pass at least one")
    heads = int(config["num_attention_heads"])
    if wish.tensor_parallel < 1 or heads % wish.tensor_parallel:
        raise BadInput(
            f"a draft tensor parallel size of {wish.tensor_parallel} is impossible",
            f"the draft has {heads} attention heads, and each device takes an equal number of them",
            "pass a divisor of that number",
        )
