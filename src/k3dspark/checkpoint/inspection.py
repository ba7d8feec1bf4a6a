"""`inspect_checkpoint`: everything about a draft directory that its files alone decide, in milliseconds.

Headers and small files are read; weights only where a comparison with the target's embedding asks for some rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.fields import describe
from k3dspark.checkpoint.files import INDEX_FILE, LM_HEAD_FILE, MODEL_FILE, no_model_at, weight_files
from k3dspark.checkpoint.findings import Finding, error, warning
from k3dspark.checkpoint.header import Header, MalformedFile, read_header
from k3dspark.checkpoint.identity import PublicDraft, identify, unsaid_switches
from k3dspark.checkpoint.inventory import expected_tensors, file_bytes, header_json, lm_head_tensor
from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.manifest import manifest_findings
from k3dspark.checkpoint.pointer import Pointer, read_pointer
from k3dspark.checkpoint.rules import Verdict, evaluate, explain
from k3dspark.checkpoint.tensor_check import TensorSummary, can_say_tensors, compare_tensors, summary
from k3dspark.errors import BadInput

LISTED: Final = 1000  # directory entries that a report names
MAX_TENSORS: Final = 20_000  # in all files together: what a header of the largest accepted size holds


@dataclass(frozen=True)
class FileReport:
    """One file: what it is, and how large it is against what the config asks for (None where nothing does).

    `size_rule` is the arithmetic behind `expected_bytes`, which is of the plain layout: other tensor names or metadata
    make a longer header, and that is no fault.
    """

    name: str
    kind: str
    bytes: int
    expected_bytes: int | None = None
    size_rule: str | None = None
    header_bytes: int | None = None
    tensors: int | None = None
    parameters: int | None = None
    pointer: Pointer | None = None


@dataclass(frozen=True)
class Inspection:
    """The report of a directory. `findings` holds each fault once; the other members are what was seen."""

    directory: Path
    files: tuple[FileReport, ...]
    config: dict[str, Any] | None
    verdicts: tuple[Verdict, ...]
    expected: TensorSummary | None
    found: TensorSummary
    public: PublicDraft | None
    findings: tuple[Finding, ...]

    @property
    def complete(self) -> bool:
        """No error was found; warnings may have been."""
        return not any(finding.level == "error" for finding in self.findings)


@dataclass
class _State:
    directory: Path
    findings: list[Finding] = field(default_factory=list)
    faulty_files: set[str] = field(default_factory=set)
    headers: dict[str, Header] = field(default_factory=dict)
    pointers: dict[str, Pointer] = field(default_factory=dict)

    def file_fault(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.faulty_files.add(finding.subject)


def inspect_checkpoint(directory: Path, target: Path | None = None, verify: bool = False) -> Inspection:
    """Inspect a draft's directory, against its target's directory when one is given.

    `verify` also hashes the weights, which takes seconds for each gigabyte, and compares with the manifest. Raises
    `BadInput` only when there is nothing to inspect.
    """
    if not directory.is_dir():
        raise no_model_at(directory)
    state = _State(directory)
    names = _names(directory)
    if not any(name == "config.json" or name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise BadInput(
            f"{directory} holds no model",
            "there is neither a config.json nor a safetensors file",
            "check the path, or run `k3dspark fetch --to DIR` to get one",
        )
    usable = [name for name in names if _stays_inside(state, name)]
    config = _read_config(state, usable)
    verdicts = evaluate(config) if config is not None else ()
    state.findings += [_rule_finding(verdict) for verdict in verdicts if verdict.status in ("fail", "warn")]
    _read_headers(state, usable)
    expected = None
    if config is not None:
        comparison = compare_tensors(config, verdicts, state.headers, frozenset(state.faulty_files))
        state.findings += comparison.findings
        expected = comparison.expected
    public = identify(config) if config is not None else None
    if config is not None and public is not None and not state.findings:
        state.findings += _switches_unsaid(config, public)
    named = {finding.subject for finding in state.findings}
    state.findings += [finding for finding in manifest_findings(directory, verify) if finding.subject not in named]
    state.findings += _leftovers(names)
    if target is not None and config is not None:
        from k3dspark.checkpoint.target_check import target_findings

        state.findings += target_findings(directory, config, verdicts, target)
    return Inspection(
        directory=directory,
        files=tuple(_file_report(state, config, verdicts, name) for name in usable),
        config=config,
        verdicts=verdicts,
        expected=expected,
        found=summary([entry for header in state.headers.values() for entry in header.tensors.values()]),
        public=public,
        findings=tuple(state.findings),
    )


def _names(directory: Path) -> list[str]:
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(names) < LISTED and not entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names)


def _stays_inside(state: _State, name: str) -> bool:
    """Symlinks may lead within the directory or, as in Hugging Face's cache, to the blobs beside its snapshots."""
    path = state.directory / name
    if not path.is_symlink():
        return True
    root = state.directory.resolve()
    try:
        leads_to = path.resolve(strict=True)
    except (OSError, RuntimeError):
        leads_to = None
    if leads_to is not None:
        in_cache = root.parent.name == "snapshots" and leads_to.parent == root.parents[1] / "blobs"
        if in_cache or leads_to.is_relative_to(root):
            return True
    state.file_fault(
        error(
            "file.symlink",
            name,
            f"{name} is a symbolic link that leads {'nowhere' if leads_to is None else 'out of the directory'}",
            "a checkpoint from elsewhere could point at any file of this machine, so it is not followed",
            "put the file itself there, or inspect the directory that the link leads to",
        )
    )
    return False


def _read_config(state: _State, names: list[str]) -> dict[str, Any] | None:
    if "config.json" not in names:
        if "config.json" not in state.faulty_files:
            state.file_fault(
                error(
                    "config.missing",
                    "config.json",
                    "config.json is missing",
                    "it says which network the weights are of; without it they cannot be judged or loaded",
                    "run `k3dspark fetch --repull --to DIR`, or take the file from where the weights came from",
                )
            )
        return None
    path = state.directory / "config.json"
    pointer = read_pointer(path) if path.is_file() else None
    if pointer is not None:
        state.file_fault(_pointer_finding("config.json", pointer, path.stat().st_size))
        return None
    try:
        return read_config(path)
    except BadInput as problem:
        state.file_fault(error("config.unreadable", "config.json", problem.what, problem.why, problem.remedy))
        return None


def _rule_finding(verdict: Verdict) -> Finding:
    what, why, remedy = explain(verdict, "config.json")
    return Finding(
        f"rule.{verdict.rule.id}", "error" if verdict.status == "fail" else "warning", verdict.field, what, why, remedy
    )


def _read_headers(state: _State, names: list[str]) -> None:
    try:
        paths = weight_files(state.directory)
    except BadInput as problem:
        if not {MODEL_FILE, INDEX_FILE} & state.faulty_files:
            subject = MODEL_FILE if INDEX_FILE not in names else INDEX_FILE
            kind = problem.kind if isinstance(problem, MalformedFile) else "index"
            state.file_fault(error(f"file.{kind}", subject, problem.what, problem.why, problem.remedy))
        paths = [state.directory / LM_HEAD_FILE] if LM_HEAD_FILE in names else []
    for path in paths:
        if path.name not in names:
            continue
        pointer = read_pointer(path)
        if pointer is not None:
            state.pointers[path.name] = pointer
            state.file_fault(_pointer_finding(path.name, pointer, path.stat().st_size))
            continue
        try:
            header = read_header(path)
            if sum(len(h.tensors) for h in (*state.headers.values(), header)) > MAX_TENSORS:
                state.file_fault(_too_many(path.name))
                return
            state.headers[path.name] = header
            header.require_whole()
        except MalformedFile as problem:
            state.file_fault(error(f"file.{problem.kind}", path.name, problem.what, problem.why, problem.remedy))
        except BadInput as problem:
            state.file_fault(error("file.unreadable", path.name, problem.what, problem.why, problem.remedy))


def _pointer_finding(name: str, pointer: Pointer, size: int) -> Finding:
    return error(
        "file.lfs_pointer",
        name,
        f"{name} is a Git LFS pointer of {size} bytes, not the file itself",
        f"the real file has {pointer.size:,} bytes (sha256 {pointer.sha256})",
        "run `git lfs install && git lfs pull` in the clone, or `git lfs fetch --recent && git lfs checkout`, "
        "or `k3dspark fetch --repull --to DIR`",
    )


def _too_many(name: str) -> Finding:
    return error(
        "file.too_many_tensors",
        name,
        f"with {name} there are more than {MAX_TENSORS:,} tensors",
        "a draft has some dozens; these files are of another kind of model, or made to exhaust memory",
        "check that this is the draft's directory",
    )


def _leftovers(names: list[str]) -> list[Finding]:
    unsafe = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    if not unsafe:
        return []
    return [
        warning(
            "file.pickle",
            unsafe[0],
            f"{unsafe[0]} may be a pickle" + (f" (and {len(unsafe) - 1} more such files)" if len(unsafe) > 1 else ""),
            "pickles can run code when they are opened; this project never opens one",
            "delete it unless something else of yours needs it",
        )
    ]


def _switches_unsaid(config: dict[str, Any], public: PublicDraft) -> list[Finding]:
    return [
        warning(
            "identity.switch",
            name,
            f"config.json: {name} is {describe(here)}, but {public.names[0]} was trained with {describe(needed)}",
            "the wrong switch loads and runs, and loses acceptance",
            f"add {name}: {describe(needed)} to config.json if this is that draft",
        )
        for name, here, needed in unsaid_switches(config, public)
    ]


# -- files ----------------------------------------------------------------------------------------------------------


def _file_report(state: _State, config: dict[str, Any] | None, verdicts: tuple[Verdict, ...], name: str) -> FileReport:
    path = state.directory / name
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    pointer = state.pointers.get(name) or (read_pointer(path) if size <= 1024 and path.is_file() else None)
    header = state.headers.get(name)
    kind = "weights" if name.endswith(".safetensors") else "config" if name == "config.json" else "other"
    expected, rule = (None, None) if config is None else _expected_size(config, verdicts, name)
    return FileReport(
        name=name,
        kind="lfs pointer" if pointer else kind,
        bytes=size,
        expected_bytes=expected,
        size_rule=rule,
        header_bytes=header.header_bytes if header else None,
        tensors=len(header.tensors) if header else None,
        parameters=header.parameters if header else None,
        pointer=pointer,
    )


def _expected_size(
    config: dict[str, Any], verdicts: tuple[Verdict, ...], name: str
) -> tuple[int, str] | tuple[None, None]:
    if name not in (MODEL_FILE, LM_HEAD_FILE) or not can_say_tensors(config, verdicts):
        return None, None
    specs = list(expected_tensors(config).values()) if name == MODEL_FILE else [lm_head_tensor(config)]
    header, data = len(header_json(specs)), sum(spec.bytes for spec in specs)
    if name == MODEL_FILE:
        rule = f"8 + header {header:,} + data {data:,} ({len(specs)} tensors)"
    else:
        (rows, width), each = specs[0].shape, specs[0].bytes // specs[0].parameters
        rule = f"vocab_size {rows} × hidden_size {width} × {each} + {8 + header}"
    return file_bytes(specs), rule
