"""Damage at random: a result or a `K3DSparkError`, never a traceback, never more than 64 MiB."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest

from k3dspark.checkpoint.explain import explain_config
from k3dspark.checkpoint.inspection import inspect_checkpoint
from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.manifest import Manifest, ManifestFile, sha256_file, write_manifest
from k3dspark.checkpoint.pointer import Pointer, pointer_text
from k3dspark.checkpoint.report import inspection_as_json
from k3dspark.checkpoint.synth import synthesise
from k3dspark.errors import K3DSparkError

ROUNDS = 40
MEASURED = 5
SNIPPETS = [
    b"", b"\0", b"\xff\xff", b"{", b"}", b"[", b"]", b'"', b",", b":", b"-1", b"1e999", b"NaN", b"null", b"true",
    b"9" * 30, b'"\\ud800"', b"[[[[[[[[", b'{"a":', b"\xed\xa0\x80", b"../", b'"__metadata__":{"a":1},', b'""',
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz") / "pair"
    synthesise(directory, tiny=True)
    draft = directory / "draft"
    files = tuple(ManifestFile(p.name, p.stat().st_size, sha256_file(p), "lfs") for p in draft.iterdir())
    write_manifest(draft, Manifest("git:https://example.org/a.git", "", "", "", files))
    return directory


def damage(data: bytes, generator: random.Random, within: int) -> bytes:
    """A few edits in the first `within` bytes: changed, removed, repeated or replaced by a snippet."""
    content = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(min(within, len(content)) or 1)
        length = generator.choice([0, 1, 1, 2, 8, 64])
        match generator.randrange(4):
            case 0 if content:
                content[at % len(content)] = generator.randrange(256)
            case 1:
                content[at : at + length] = generator.choice(SNIPPETS)
            case 2:
                content[at:at] = content[at : at + length]
            case _:
                del content[at : None if generator.random() < 0.05 else at + length]
    return bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "draft/config.json",
        "draft/model.safetensors",
        "draft/lm_head.safetensors",
        "draft/.k3dspark/manifest.json",
        "target/config.json",
        "target/tokenizer_config.json",
        "target/model.safetensors",
        "pointer",
    ],
)
def test_damaged_files_never_surprise(pair: Path, tmp_path: Path, name: str) -> None:
    generator = random.Random(name)
    work = Path(shutil.copytree(pair, tmp_path / "pair"))
    path = work / ("draft/lm_head.safetensors" if name == "pointer" else name)
    original = pointer_text(Pointer("ab" * 32, 41_048)) if name == "pointer" else path.read_bytes()
    within = 8 + int.from_bytes(original[:8], "little") if name.endswith(".safetensors") else len(original)
    for number in range(ROUNDS):
        path.write_bytes(damage(original, generator, within))
        if number == ROUNDS - MEASURED:
            tracemalloc.start()  # from here on: it makes everything several times slower
        try:
            inspection = inspect_checkpoint(work / "draft", work / "target")
            json.dumps(inspection_as_json(inspection))
            assert inspection.complete == (not [f for f in inspection.findings if f.level == "error"])
            explain_config(read_config(work / "draft"), "zh")
        except K3DSparkError as error:
            parts = (error.what, error.why, error.remedy)
            assert all(parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
