"""A directory of Kimi K3: recognised, its index checked and its memory reckoned before a single weight is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from k3dspark.checkpoint.files import INDEX_FILE, MODEL_FILE
from k3dspark.checkpoint.header import read_header
from k3dspark.checkpoint.kimi_k3 import FP4_GROUP, KimiK3Shape, kimi_k3_tensors, packed_names
from k3dspark.errors import BadInput
from k3dspark.target.kimi_k3_model import KimiK3Model
from k3dspark.target.kimi_k3_tensors import Tensors

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, the values of the lower three bits
E8M0_BIAS = 127
NO_SCALE = 255  # e8m0's NaN
WORKING_BYTES = 1 << 28  # states, caches and temporaries of a small model
_AGAIN = "fetch the model again"


def load_kimi_k3(directory: Path, config: Mapping[str, Any], dtype: torch.dtype) -> KimiK3Model:
    """The text model in a directory of Kimi K3; quantised experts are expanded to `dtype`.

    Raises `BadInput` when config.json is not of the published architecture, when the index lacks a tensor or a shard
    is missing, when the expanded model does not fit into this machine's memory, and for a damaged or foreign tensor.
    """
    shape = KimiK3Shape.from_config(config)
    files, shapes = _tensor_files(directory), kimi_k3_tensors(shape)
    missing = [name for name in shapes if not stored_as(name, files)]
    if missing:
        raise BadInput(
            f"{len(missing)} tensors are missing from {directory}, such as {missing[0]}",
            "config.json asks for them under these names, as Kimi K3 was published",
            "use config.json and weights of one and the same model",
        )
    _require_memory(directory, shapes, dtype)
    _require_shards(directory, set(files.values()))
    reader = _Reader(directory, files, shapes)
    return KimiK3Model(shape, Tensors(reader, dtype))


def stored_as(name: str, stored: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under which a tensor lies there: its own, or those of numbers and scales; none when it is missing."""
    if name in stored:
        return (name,)
    packed = packed_names(name)
    return packed if all(part in stored for part in packed) else ()


def unpack_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """A matrix [out, in] in fp32 from MXFP4 (OCP Microscaling 1.0): bytes [out, in / 2], scales [out, in / 32].

    The lower half of a byte is the earlier number: a sign and e2m1. A scale is a power of two, its exponent plus 127.
    """
    if int(scales.max()) == NO_SCALE:
        raise ValueError("a scale is NaN")
    values = torch.tensor([*FP4, *(-value for value in FP4)], device=packed.device)
    pairs = torch.stack([packed & 15, packed >> 4], -1)  # [out, in / 2, 2]
    numbers = values[pairs.long()].view(*scales.shape, FP4_GROUP)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - E8M0_BIAS).flatten(1)


class _Reader:
    """Tensors by published name, from whichever shard holds them, checked against the shapes config.json implies."""

    def __init__(self, directory: Path, files: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._directory, self._files, self._shapes = directory, files, shapes
        self._open: dict[str, Any] = {}

    def __call__(self, name: str) -> Tensor:
        stored = stored_as(name, self._files)
        wanted = self._shapes[name]
        tensors = [self._stored(part) for part in stored]
        if len(tensors) == 2:
            try:
                tensor = unpack_fp4(*tensors)
            except (ValueError, RuntimeError) as error:
                raise BadInput(f"{name} is no MXFP4 matrix", str(error).splitlines()[0], _AGAIN) from error
        else:
            (tensor,) = tensors
        if tuple(tensor.shape) != wanted and not (name.endswith(".A_log") and tensor.numel() <= wanted[0]):
            raise BadInput(
                f"tensor {name} has shape {list(tensor.shape)}",
                f"config.json asks for {list(wanted)}",
                "config.json and the weights belong to different models; fetch both again",
            )
        if tensor.dtype not in FLOATS:
            raise BadInput(
                f"tensor {name} holds {tensor.dtype}",
                "only the experts of Kimi K3 are quantised, in MXFP4; everything else is floats",
                "use the weights as they were published",
            )
        return tensor

    def _stored(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._directory / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except Exception as error:  # safetensors raises its own type, OSError or ValueError by damage
            raise BadInput(
                f"{name} cannot be read from {self._directory / file}", f"{type(error).__name__}: {error}", _AGAIN
            ) from error
        return tensor


def _tensor_files(directory: Path) -> dict[str, str]:
    """Tensor name → file name, from the index or from the header of the one file."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / MODEL_FILE).is_file():
            raise BadInput(
                f"{directory} has no weights", f"there is neither {INDEX_FILE} nor {MODEL_FILE}", "fetch the model"
            )
        return dict.fromkeys(read_header(directory / MODEL_FILE).tensors, MODEL_FILE)
    try:
        # Half a million names at full size: more than the strict reader of small files lets through.
        mapping = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{index} is not a weight index", f"{error!r}", _AGAIN) from error
    foreign = next((file for file in files.values() if Path(file).name != file), None)
    if foreign is not None:
        raise BadInput(
            f"{index} names {foreign[:120]!r}", "weights lie beside the index", "fetch it from a source you trust"
        )
    return files


def _require_shards(directory: Path, files: set[str]) -> None:
    absent = sorted(file for file in files if not (directory / file).is_file())
    if absent:
        raise BadInput(
            f"{len(absent)} of {len(files)} weight files are missing from {directory}, such as {absent[0]}",
            f"{INDEX_FILE} names them",
            "fetch them",
        )


def _require_memory(directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    count = sum(math.prod(size) for size in shapes.values())
    needed, available = count * dtype.itemsize + WORKING_BYTES, available_memory()
    if available is None or needed <= available:
        return
    raise BadInput(
        f"the Kimi K3 in {directory} does not fit into this machine's memory",
        f"{count:,} parameters in {str(dtype).removeprefix('torch.')} need {_gib(needed)}, {_gib(available)} are "
        f"available; config.json and all {len(shapes):,} tensors of the index are as published",
        "serve it with an engine on a cluster (k3dspark plan, k3dspark launch), or rehearse with the miniature: "
        "k3dspark synth --mini-k3 --out DIR",
    )


def available_memory() -> int | None:
    """Bytes that can be had without swapping, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
