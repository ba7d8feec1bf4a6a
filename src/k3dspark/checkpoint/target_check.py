"""A draft against its target's directory: sizes, taps, rope, special tokens, and embedding rows bit by bit."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.fields import describe, rope_parameters
from k3dspark.checkpoint.files import INDEX_FILE, LM_HEAD_FILE, MODEL_FILE, weight_files
from k3dspark.checkpoint.findings import Finding, error, warning
from k3dspark.checkpoint.header import read_header
from k3dspark.checkpoint.inventory import EMBEDDING, LM_HEAD, canonical_name
from k3dspark.checkpoint.jsonfile import read_config, read_object
from k3dspark.checkpoint.rows import StoredMatrix, as_floats, equal_in, norm
from k3dspark.checkpoint.rules import Verdict
from k3dspark.errors import BadInput

SAMPLED_ROWS: Final = 48
# A rotation keeps norms to rounding; two unrelated rows of one width and scale agree this well one time in eight.
NORM_TOLERANCE: Final = 2e-3
TOKENIZER_HEAD_BYTES: Final = 1 << 20
INDEX_CHUNK: Final = 1 << 20
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight", EMBEDDING)
_HEADS: Final = (LM_HEAD, "language_model.lm_head.weight")
_OTHER_TARGET: Final = "the draft was made for another target; use the one it was trained with, or another draft"


def target_findings(
    directory: Path, config: dict[str, Any], verdicts: Iterable[Verdict], target: Path
) -> list[Finding]:
    """Every disagreement between a draft's directory and its target's. Raises `BadInput` when the target is none."""
    if not target.is_dir():
        raise BadInput(f"{target} is not a directory", "the target is a directory with config.json", "check --target")
    theirs = read_config(target)
    inner = theirs.get("text_config")
    theirs = {**theirs, **inner} if isinstance(inner, dict) else theirs
    failed = {verdict.field for verdict in verdicts if verdict.status == "fail"}
    findings = [*_sizes(config, failed, theirs), *_rope(config, failed, theirs)]
    same_vocabulary = not any(finding.subject == "vocab_size" for finding in findings)
    if same_vocabulary:
        findings += _special_tokens(config, failed, theirs, target)
    if not findings or all(finding.level == "warning" or finding.id == "target.special_ids" for finding in findings):
        findings += _embeddings(directory, target, config, failed)
    return findings


def _sizes(config: dict[str, Any], failed: set[str], theirs: Mapping[str, Any]) -> list[Finding]:
    findings = []
    for own, other, consequence in (
        ("vocab_size", "vocab_size", "token ids would mean different tokens"),
        ("target_hidden_size", "hidden_size", "the taps would not fit context_proj"),
        ("target_num_hidden_layers", "num_hidden_layers", "the tapped layers would be others than in training"),
    ):
        here, there = config.get(own), theirs.get(other)
        if own in failed or not isinstance(there, int) or here == there:
            continue
        findings.append(
            error(
                f"target.{other}",
                own,
                f"{own} is {describe(here)}, but the target's {other} is {describe(there)}",
                consequence,
                _OTHER_TARGET,
            )
        )
    layers, taps = theirs.get("num_hidden_layers"), config.get("target_layer_ids")
    if isinstance(layers, int) and isinstance(taps, list) and not failed & {"target_layer_ids"} and not findings:
        outside = [tap for tap in taps if isinstance(tap, int) and tap >= layers]
        if outside:
            findings.append(
                error(
                    "target.taps",
                    "target_layer_ids",
                    f"layer {outside[0]} does not exist in this target of {layers} layers",
                    "there is no hidden state to take",
                    _OTHER_TARGET,
                )
            )
    return findings


def _rope(config: dict[str, Any], failed: set[str], theirs: Mapping[str, Any]) -> list[Finding]:
    """Only where both state YaRN: a target without rotary positions, like Kimi K3, has nothing to compare."""
    if any(name.startswith(("rope", "max_position")) for name in failed):
        return []
    other = rope_parameters(theirs)
    mine = rope_parameters(config)
    if mine["rope_type"] != "yarn" or other["rope_type"] != "yarn":
        return []
    names = ("factor", "original_max_position_embeddings", "rope_theta")
    differing = [name for name in names if other.get(name) is not None and other[name] != mine.get(name)]
    if not differing:
        return []
    pairs = ", ".join(f"{name} {describe(mine.get(name))} here and {describe(other[name])} there" for name in differing)
    return [
        warning(
            "target.rope",
            f"rope_parameters.{differing[0]}",
            f"YaRN differs from the target's: {pairs}",
            "long contexts are then placed differently in draft and target, and acceptance falls with their length",
            "compare both config.json files with where they came from",
        )
    ]


# -- special tokens -------------------------------------------------------------------------------------------------


@dataclass
class _Tokens:
    """Special token ids that a target states; None or empty where it says nothing."""

    bos: int | None = None
    pad: int | None = None
    stops: set[int] | None = None
    content: dict[int, str] | None = None


def _special_tokens(config: dict[str, Any], failed: set[str], theirs: Mapping[str, Any], target: Path) -> list[Finding]:
    tokens = _read_tokens(theirs, target)
    differing = []
    for name, there in (("bos_token_id", tokens.bos), ("pad_token_id", tokens.pad)):
        here = config.get(name)
        if name not in failed and here is not None and there is not None and here != there:
            differing.append((name, f"{name} is {describe(here)} here and {there} there"))
    stops, here = tokens.stops or set(), config.get("eos_token_id")
    own = set(here) if isinstance(here, list) else {here}
    if "eos_token_id" not in failed and here is not None and stops and not own & stops:
        differing.append(("eos_token_id", f"eos_token_id is {describe(here)} here and {sorted(stops)} there"))
    mask, content = config.get("mask_token_id"), tokens.content or {}
    used = {tokens.bos, tokens.pad, *stops} - {None}
    if "mask_token_id" not in failed and isinstance(mask, int) and mask in used:
        differing.append(("mask_token_id", f"mask_token_id {mask} is {content.get(mask, 'a token in use')!r} there"))
    if not differing:
        return []
    return [
        error(
            "target.special_ids",
            differing[0][0],
            "special token ids differ from the target's: " + "; ".join(text for _, text in differing),
            "the draft would see or stop at other tokens than it was trained with",
            "use the tokenizer and config.json that belong to the target this draft was trained with",
        )
    ]


def _read_tokens(theirs: Mapping[str, Any], target: Path) -> _Tokens:
    """The tokenizer's word first, then generation_config.json's and config.json's."""
    tokenizer = _optional(target / "tokenizer_config.json")
    generation = _optional(target / "generation_config.json")
    content = _added_tokens(tokenizer, target)
    by_content = {text: token for token, text in content.items()}

    def token(name: str) -> int | None:
        stated = tokenizer.get(f"{name}_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        found = by_content.get(text) if isinstance(text, str) else None
        configured = theirs.get(f"{name}_token_id")
        return found if found is not None else configured if isinstance(configured, int) else None

    stops: set[int] = set()
    for value in (token("eos"), theirs.get("eos_token_id"), generation.get("eos_token_id")):
        stops |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    return _Tokens(token("bos"), token("pad"), stops, content)


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except BadInput:
        return {}  # a target's side file that we cannot read proves nothing against the draft


def _added_tokens(tokenizer: Mapping[str, Any], target: Path) -> dict[int, str]:
    entries = tokenizer.get("added_tokens_decoder")
    content: dict[int, str] = {}
    if isinstance(entries, dict):
        for token, entry in entries.items():
            if token.isdecimal() and len(token) < 10 and isinstance(entry, dict):
                content[int(token)] = str(entry.get("content"))
        return content
    for entry in _added_in_tokenizer_json(target / "tokenizer.json"):
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            content[entry["id"]] = str(entry.get("content"))
    return content


def _added_in_tokenizer_json(path: Path) -> list[Any]:
    """The added_tokens array, which stands near the top of a file too large to parse whole."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        text = file.read(TOKENIZER_HEAD_BYTES).decode("utf-8", "replace")
    start = re.search(r'"added_tokens"\s*:\s*', text)
    if start is None:
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start.end())
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


# -- embedding rows -------------------------------------------------------------------------------------------------


def _embeddings(directory: Path, target: Path, config: dict[str, Any], failed: set[str]) -> list[Finding]:
    compared = []
    for file, names, theirs_names, what in (
        (MODEL_FILE, EMBEDDING, _EMBEDDINGS, "embed_tokens"),
        (LM_HEAD_FILE, LM_HEAD, _HEADS, "lm_head"),
    ):
        own = _matrix(directory, [file], lambda name, wanted=names: canonical_name(name) == wanted)
        other = _matrix_of_target(target, theirs_names)
        if own is not None and other is not None:
            compared.append((what, *_compare_rows(own, other, config, failed)))
    rotated = [(what, detail) for what, verdict, detail in compared if verdict == "rotated"]
    if rotated:
        return [
            error(
                "target.rotated",
                rotated[0][0],
                f"{' and '.join(what for what, _ in rotated)}: rows differ from the target's, though {rotated[0][1]}",
                "equal norms of different rows mean a rotated basis, as quantisation with QuaRot makes it: the taps "
                "are rotated too, and context_proj would read them wrongly",
                "use the unrotated target, or an engine that undoes the rotation in context_proj and keeps the "
                "draft's own embedding and lm_head",
            )
        ]
    return [
        error(
            f"target.{what}",
            what,
            f"{what}: {detail}",
            "draft and target share this matrix in training; another one belongs to another target",
            _OTHER_TARGET,
        )
        for what, verdict, detail in compared
        if verdict == "different"
    ][:1]


def _compare_rows(own: StoredMatrix, other: StoredMatrix, config: dict[str, Any], failed: set[str]) -> tuple[str, str]:
    """("same" | "rotated" | "different" | "unread", what was seen)."""
    if not own.readable() or not other.readable():
        return "unread", ""
    if own.entry.shape[1] != other.entry.shape[1]:
        return "different", f"it is {own.entry.shape[1]} wide here and {other.entry.shape[1]} there"
    rows = min(own.entry.shape[0], other.entry.shape[0])
    indices = _sampled(rows, config, failed)
    unequal, rotated = [], 0
    coarser = own.entry.dtype if own.entry.dtype != "F32" else other.entry.dtype
    for index, mine, theirs in zip(indices, own.rows(indices), other.rows(indices), strict=True):
        if own.entry.dtype == other.entry.dtype and mine == theirs:
            continue
        first, second = as_floats(mine, own.entry.dtype), as_floats(theirs, other.entry.dtype)
        if equal_in(first, second, coarser):
            continue
        unequal.append(index)
        length = norm(second)
        rotated += length > 0 and math.isclose(norm(first), length, rel_tol=NORM_TOLERANCE)
    if not unequal:
        return "same", ""
    if rotated == len(unequal):
        return "rotated", f"each has the target's norm ({len(unequal)} of {len(indices)} sampled rows)"
    return "different", f"row {unequal[0]} differs from the target's ({len(unequal)} of {len(indices)} sampled rows)"


def _sampled(rows: int, config: Mapping[str, Any], failed: set[str]) -> list[int]:
    """Special tokens, the first and last rows, and others drawn with a fixed seed."""
    special = [config.get(n) for n in ("mask_token_id", "bos_token_id", "pad_token_id") if n not in failed]
    chosen = {i for i in special if isinstance(i, int) and i < rows} | {0, rows - 1} if rows else set()
    generator = random.Random(0)
    chosen |= {generator.randrange(rows) for _ in range(SAMPLED_ROWS)} if rows else set()
    return sorted(chosen)


def _matrix(directory: Path, files: Iterable[str], wanted: Any) -> StoredMatrix | None:
    for file in files:
        path = directory / file
        try:
            header = read_header(path)
        except BadInput:
            continue
        for name, entry in header.tensors.items():
            if wanted(name):
                return StoredMatrix(path, header, entry)
    return None


def _matrix_of_target(target: Path, names: tuple[str, ...]) -> StoredMatrix | None:
    """The target's matrix, found through its index, which may be too large to parse whole."""
    if not (target / INDEX_FILE).is_file():
        try:
            files = [path.name for path in weight_files(target)]
        except BadInput:
            files = []
        return _matrix(target, files, lambda name: name in names)
    for name in names:
        file = _in_index(target / INDEX_FILE, name)
        if file is not None and re.fullmatch(r"[\w.\-]+\.safetensors", file):
            return _matrix(target, [file], lambda stored, wanted=name: stored == wanted)
    return None


def _in_index(path: Path, name: str) -> str | None:
    pattern = re.compile(rb'"' + re.escape(name.encode()) + rb'"\s*:\s*"([^"\\]{1,255})"')
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(INDEX_CHUNK):
            found = pattern.search(tail + chunk)
            if found:
                return found[1].decode("utf-8", "replace")
            tail = (tail + chunk)[-1024:]
    return None
