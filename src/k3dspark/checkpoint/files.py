"""The weight files of a draft directory, and the tensors in them under canonical names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from k3dspark.checkpoint.header import MalformedFile, TensorEntry, read_header
from k3dspark.checkpoint.inventory import canonical_name
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.errors import BadInput

MODEL_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
LM_HEAD_FILE: Final = "lm_head.safetensors"
INDEX_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: its canonical name, and file and entry under the stored name."""

    name: str
    path: Path
    entry: TensorEntry


def no_model_at(directory: Path) -> BadInput:
    """The error for a place that should be a model's directory and is none."""
    what = f"{directory} is not a directory" if directory.exists() else f"there is no directory {directory}"
    return BadInput(what, "a model is a directory with config.json", "check the path, or get it: k3dspark fetch --help")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory: one or the shards of its index, then lm_head's if it is there.

    Raises `BadInput` when there are none, or when an index names a file outside the directory.
    """
    if not directory.is_dir():
        raise no_model_at(directory)
    if (directory / MODEL_FILE).exists() or not (directory / INDEX_FILE).exists():
        paths = [directory / MODEL_FILE]
        if not paths[0].exists():
            raise MalformedFile(
                "missing_file",
                f"{MODEL_FILE} is missing in {directory}",
                "the draft's weights are in that file",
                "fetch the model again, or check the path",
            )
    else:
        paths = _shards(directory)
    head = directory / LM_HEAD_FILE
    return [*paths, head] if head.exists() and head not in paths else paths


def _shards(directory: Path) -> list[Path]:
    path = directory / INDEX_FILE
    mapping = read_object(path, INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise BadInput(f"{path} cannot be used", "it has no weight_map of tensor names to files", "fetch it again")
    shards = []
    for name in sorted(set(mapping.values())):
        if not name.endswith(".safetensors") or name != os.path.basename(name) or "\\" in name or "\0" in name:
            raise BadInput(
                f"{path} cannot be used",
                f"it names {name[:120]!r}, which is not a safetensors file in this directory",
                "do not use this model; fetch it from a source you trust",
            )
        if not (directory / name).exists():
            raise MalformedFile(
                "missing_file", f"{name} is missing in {directory}", f"{path.name} names it", "fetch the model again"
            )
        shards.append(directory / name)
    return shards


def stored_tensors(paths: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of these files by canonical name. Raises `MalformedFile` on damage and `BadInput` on doubles."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for entry in read_header(path).require_whole().tensors.values():
            name = canonical_name(entry.name)
            if name in found:
                other = found[name]
                raise BadInput(
                    f"the tensor {name} is there twice",
                    f"as {other.entry.name} in {other.path.name} and as {entry.name} in {path.name}",
                    "remove the file that does not belong to this model, or fetch it again",
                )
            found[name] = StoredTensor(name, path, entry)
    return found


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes `path`'s place when the block ends without an error; else nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    """A JSON file, at once, indented as transformers does."""
    with replacing(path) as file:
        file.write((json.dumps(mapping, indent=2, ensure_ascii=False) + "\n").encode())


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut, where the platform can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
