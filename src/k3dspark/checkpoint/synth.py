"""Random checkpoints with the real names, shapes, order, header and byte sizes, to rehearse with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from k3dspark.checkpoint.files import INDEX_FILE, LM_HEAD_FILE, MODEL_FILE, replacing, write_json
from k3dspark.checkpoint.inventory import (
    EMBEDDING,
    TensorSpec,
    expected_tensors,
    file_bytes,
    header_json,
    lm_head_tensor,
)
from k3dspark.checkpoint.kimi_k3 import PREFIX
from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.checkpoint.space import require_space
from k3dspark.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

ORIGIN: Final = "k3dspark synth: random weights, for rehearsals only"
BLOCK: Final = 1 << 22  # numbers drawn at a time
EMBEDDING_SEED: Final = 1_000_003
HEAD_SEED: Final = 1_000_033
TapStream = Literal["prefix", "attn_res"]


@dataclass(frozen=True)
class Synthesised:
    """What was written: files by path, with their sizes in bytes."""

    files: dict[Path, int]


def synthesise(
    directory: Path,
    *,
    tiny: bool = False,
    mini_k3: TapStream | None = None,
    sparse: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Synthesised:
    """Write a draft of random weights into `directory`, which must be empty or new.

    `sparse` leaves holes where the data would be: the sizes are right and it takes no time or space. `tiny` makes the
    layout in miniature in `directory/draft`, with a matching Llama in `directory/target`; `mini_k3` does so with a Kimi
    K3 of all 93 layers, for a draft that taps this stream of it. `progress` gets bytes written and in all. Raises
    `BadInput` when the directory holds something or the disk is too small.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput(
            f"{directory} is not empty",
            "a synthetic checkpoint must not be mixed with other files",
            "name a directory that does not exist yet",
        )
    pair = _Pair.of(tiny, mini_k3)
    config = {**(pair.draft if pair else published_config()), "_converted_from": ORIGIN}
    draft = directory / "draft" if pair else directory
    groups = {
        draft / MODEL_FILE: list(expected_tensors(config).values()),
        draft / LM_HEAD_FILE: [lm_head_tensor(config)],
    }
    if pair:
        groups |= {directory / "target" / file: specs for file, specs in pair.shards.items()}
    total = sum(file_bytes(specs) for specs in groups.values())
    require_space(directory, 1 << 20 if sparse else total)

    writer = _Writer(seed, sparse, total, progress)
    for path, specs in groups.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.write(path, specs)
    write_json(draft / "config.json", config)
    if pair:
        pair.write_text(directory / "target")
    written = sorted(p for p in directory.rglob("*") if p.is_file())
    return Synthesised({path: path.stat().st_size for path in written})


@dataclass(frozen=True)
class _Pair:
    """A draft in miniature and the target that it belongs to."""

    draft: dict[str, Any]  # config.json
    target: dict[str, Any]
    shards: dict[str, list[TensorSpec]]  # of the target, by file name

    @classmethod
    def of(cls, tiny: bool, mini_k3: TapStream | None) -> _Pair | None:
        if mini_k3 is not None:
            from k3dspark.checkpoint.mini_kimi_k3 import mini_draft_config, mini_kimi_k3_config, mini_kimi_k3_shards

            return cls(mini_draft_config(mini_k3), mini_kimi_k3_config(), mini_kimi_k3_shards())
        if tiny:
            from k3dspark.checkpoint.tiny_target import target_config, target_tensors

            return cls(tiny_config(), target_config(), {MODEL_FILE: target_tensors()})
        return None

    def write_text(self, directory: Path) -> None:
        """Everything of the target but its weights."""
        from k3dspark.checkpoint.mini_kimi_k3 import index_of
        from k3dspark.checkpoint.tiny_target import write_target_text

        write_json(directory / "config.json", self.target)
        write_target_text(directory)
        if len(self.shards) > 1:
            write_json(directory / INDEX_FILE, index_of(self.shards))


class _Writer:
    def __init__(self, seed: int, sparse: bool, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._seed, self._sparse, self._total = seed, sparse, total
        self._done = 0
        self._progress = progress

    def write(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        specs = list(specs)
        header = header_json(specs)
        with replacing(path) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            if self._sparse:
                file.truncate(file_bytes(specs))
                return
            for index, spec in enumerate(specs):
                self._write_tensor(file, spec, index)

    def _write_tensor(self, file: IO[bytes], spec: TensorSpec, index: int) -> None:
        for block in random_blocks(spec, self._seed, index):
            data = block.tobytes()
            file.write(data)
            self._done += len(data)
            if self._progress is not None:
                self._progress(self._done, self._total)


def random_blocks(spec: TensorSpec, seed: int, index: int) -> Iterator[np.ndarray[Any, Any]]:
    """A tensor's content block by block: norms are ones, biases zeros, everything else N(0, 0.02).

    The embedding and the lm_head depend on the seed alone, so that a draft and its tiny target share them.
    """
    import numpy as np

    stream = {EMBEDDING: EMBEDDING_SEED, "model.embed_tokens.weight": EMBEDDING_SEED, "lm_head.weight": HEAD_SEED}
    shared = stream.get(spec.name.removeprefix(PREFIX))
    if spec.name.startswith(PREFIX) and shared is None:
        from k3dspark.checkpoint.mini_kimi_k3 import mini_blocks

        yield from mini_blocks(spec, seed)
        return
    generator = np.random.default_rng([seed, index if shared is None else shared])
    left = spec.parameters
    while left:
        count = min(left, BLOCK)
        left -= count
        if "norm" in spec.name:
            values = np.ones(count, np.float32)
        elif spec.name.endswith(".bias"):
            values = np.zeros(count, np.float32)
        else:
            values = generator.standard_normal(count, np.float32)
            values *= np.float32(0.02)
        yield _as(values, spec.dtype)


def _as(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if dtype == "BF16":
        bits = values.view(np.uint32)
        # round to nearest even: add half of the last kept bit, plus that bit
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return values.astype("<f2" if dtype == "F16" else "<f4", copy=False)
