"""Whether a target's directory is whole: every shard of its index there, with the tensors that the index promises, and
every decoder layer among them. Headers are read, never weights; a target may have hundreds of thousands of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import INDEX_FILE, MODEL_FILE
from k3dspark.checkpoint.header import MalformedFile, read_header
from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.pointer import read_pointer
from k3dspark.errors import BadInput

_CHUNK: Final = 1 << 20
_ENTRY: Final = re.compile(rb'"([^"\\]{1,512})"\s*:\s*"([^"\\/]{1,255}\.safetensors)"')
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,5})\.")
# Towers for images and sound count their own layers.
_OTHER_TOWERS: Final = re.compile(r"(?:^|\.)(vision|visual|audio|image)\w*\.")


@dataclass(frozen=True)
class ShardFault:
    """One weight file that is not what it should be."""

    file: str
    kind: str
    detail: str


@dataclass(frozen=True)
class TargetFiles:
    """What is there. `layers` are decoder layers with at least one tensor; `stated_layers` is config.json's number.

    `matrices` are those that a draft may share: embed_tokens, lm_head.
    """

    directory: Path
    config: dict[str, Any]
    stated_layers: int | None
    layers: frozenset[int]
    shards: int
    bytes: int
    faults: tuple[ShardFault, ...]
    matrices: frozenset[str] = frozenset()

    @property
    def missing_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.stated_layers or 0)) - self.layers))


def read_target(directory: Path) -> TargetFiles:
    """Read a target's directory. Raises `BadInput` when it has no readable config.json."""
    config = read_config(directory)
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    stated = config.get("num_hidden_layers")
    promised: Counter[str] = Counter()
    layers: set[int] = set()
    matrices: set[str] = set()
    index = directory / INDEX_FILE
    has_index = index.is_file() and read_pointer(index) is None
    if has_index:
        for name, file in _index_entries(index):
            promised[file] += 1
            layers |= _layer_of(name)
            matrices |= _matrix_of(name)
    files = sorted(promised) if has_index else [MODEL_FILE]
    faults, total = [], 0
    for file in files:
        fault, size, names = _read_shard(directory / file, promised.get(file))
        total += size
        if fault is not None:
            faults.append(fault)
        for name in names if not has_index else ():
            layers |= _layer_of(name)
            matrices |= _matrix_of(name)
    if not has_index and index.exists():
        faults.insert(0, ShardFault(INDEX_FILE, "lfs_pointer", "it is a Git LFS pointer"))
    if has_index and not promised:
        faults.append(ShardFault(INDEX_FILE, "index", "it names no shard"))
    return TargetFiles(
        directory=directory,
        config=config,
        stated_layers=stated if isinstance(stated, int) and 0 < stated < 100_000 else None,
        layers=frozenset(layers),
        shards=len(files),
        bytes=total,
        faults=tuple(faults),
        matrices=frozenset(matrices),
    )


def _matrix_of(name: str) -> set[str]:
    return {matrix for matrix in ("embed_tokens", "lm_head") if name.endswith(f"{matrix}.weight")}


def _layer_of(name: str) -> set[int]:
    found = _LAYER.search(name)
    return {int(found[1])} if found and not _OTHER_TOWERS.search(name) else set()


def _read_shard(path: Path, promised: int | None) -> tuple[ShardFault | None, int, list[str]]:
    """(fault, bytes on disk, tensor names)."""
    if not path.is_file():
        return ShardFault(path.name, "missing", "it is not there"), 0, []
    size = path.stat().st_size
    pointer = read_pointer(path)
    if pointer is not None:
        detail = f"it is a Git LFS pointer of {size} bytes instead of {pointer.size:,}"
        return ShardFault(path.name, "lfs_pointer", detail), size, []
    try:
        header = read_header(path)
        names = list(header.tensors)
        header.require_whole()
    except MalformedFile as problem:
        return ShardFault(path.name, problem.kind, problem.why), size, []
    except BadInput as problem:
        return ShardFault(path.name, "unreadable", problem.why), size, []
    if promised is not None and promised != len(names):
        detail = f"the index promises {promised:,} tensors in it, and it holds {len(names):,}"
        return ShardFault(path.name, "index", detail), size, names
    return None, size, names


def _index_entries(path: Path) -> Iterator[tuple[str, str]]:
    """(tensor, file) of an index of any size, read in pieces."""
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            text = tail + chunk
            end = 0
            for found in _ENTRY.finditer(text):
                end = found.end()
                yield found[1].decode("utf-8", "replace"), found[2].decode("utf-8", "replace")
            tail = text[max(end, len(text) - 2048) :]
