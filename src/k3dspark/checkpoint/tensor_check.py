"""Tensors on disk against the tensors that config.json asks for: each disagreement named once, at its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from k3dspark.checkpoint.fields import BY_NAME, describe, value_of
from k3dspark.checkpoint.files import INDEX_FILE, LM_HEAD_FILE
from k3dspark.checkpoint.findings import Finding, error
from k3dspark.checkpoint.header import Header, TensorEntry
from k3dspark.checkpoint.inventory import (
    LM_HEAD,
    TensorSpec,
    canonical_name,
    expected_tensors,
    file_bytes,
    lm_head_tensor,
)
from k3dspark.checkpoint.published import published_config
from k3dspark.checkpoint.repair import repair
from k3dspark.checkpoint.rules import Verdict

_MISFIT: Final = "config.json and the weights do not belong together; fetch both again"
_SWITCHES: Final = {
    "draft_vocab_size",
    "num_target_layers",
    "torch_dtype",
    "dtype",
    "fc_norm",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "share_target_embeddings",
    "num_hidden_layers",
}


@dataclass(frozen=True)
class TensorSummary:
    """Counts of one side of the comparison."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """What config.json asks for in all (None when it cannot say), and what is wrong with what is there."""

    expected: TensorSummary | None
    findings: tuple[Finding, ...]


def summary(entries: Iterable[TensorEntry | TensorSpec]) -> TensorSummary:
    """Count, parameters and bytes of stored or expected tensors."""
    entries = list(entries)
    data = sum(e.bytes if isinstance(e, TensorSpec) else e.end - e.begin for e in entries)
    return TensorSummary(len(entries), sum(e.parameters for e in entries), data)


def can_say_tensors(config: Mapping[str, Any], verdicts: Iterable[Verdict]) -> bool:
    """Whether every field that tensors follow from has a usable value."""
    shaping = _SWITCHES | {name for spec in expected_tensors(published_config()).values() for name in spec.fields}
    unusable = {v.field for v in verdicts if v.status == "fail" and v.rule.id.startswith("kind.")}
    if "target_layer_ids" in unusable and config.get("num_target_layers") is None:
        return False
    return not unusable & shaping & BY_NAME.keys()


def compare_tensors(
    config: dict[str, Any],
    verdicts: tuple[Verdict, ...],
    headers: Mapping[str, Header],
    faulty_files: frozenset[str],
) -> Comparison:
    """Judge the headers of a directory's files; `faulty_files` are named in other findings already."""
    if not can_say_tensors(config, verdicts):
        return Comparison(None, ())
    failed = {verdict.field for verdict in verdicts if verdict.status == "fail"}
    specs, head = expected_tensors(config), lm_head_tensor(config)
    needs_head = not (value_of(config, "tie_word_embeddings") or value_of(config, "share_target_embeddings"))
    wanted = [*specs.values(), *([head] if needs_head else [])]

    found, findings = _found(headers)
    stored_head = found.pop(LM_HEAD, None)
    unread = {name for name in faulty_files if name not in headers and name != LM_HEAD_FILE}
    if not findings and not any(name.endswith(".safetensors") or name == INDEX_FILE for name in unread):
        findings += _compare(config, failed, specs, found)
    explained = any(finding.id == "config.contradicts_weights" for finding in findings)
    if stored_head is not None:
        if not explained and not failed & {"vocab_size", "hidden_size", "torch_dtype"}:
            findings += _judge_head(config, head, stored_head)
    elif needs_head and LM_HEAD_FILE not in faulty_files:
        findings.append(_missing_head(head, headers.get(LM_HEAD_FILE)))
    return Comparison(summary(wanted), tuple(findings))


def _found(headers: Mapping[str, Header]) -> tuple[dict[str, TensorEntry], list[Finding]]:
    found: dict[str, TensorEntry] = {}
    doubled = []
    for file, header in headers.items():
        if file == LM_HEAD_FILE and LM_HEAD not in map(canonical_name, header.tensors):
            continue  # named by `_missing_head`
        for entry in header.tensors.values():
            name = canonical_name(entry.name)
            if name in found:
                doubled.append(
                    error(
                        "tensor.doubled",
                        name,
                        f"the tensor {name} is there twice, as {found[name].name} and as {entry.name} in {file}",
                        "it is not decided which of them a loader takes",
                        "remove the file that does not belong to this model, or fetch it again",
                    )
                )
            found[name] = entry
    return found, doubled[:1]


def _compare(
    config: dict[str, Any], failed: set[str], specs: dict[str, TensorSpec], found: dict[str, TensorEntry]
) -> list[Finding]:
    missing = [name for name in specs if name not in found]
    surplus = [name for name in found if name not in specs]
    shapes = [n for n, spec in specs.items() if n in found and found[n].shape != spec.shape]
    dtypes = [n for n, spec in specs.items() if n in found and found[n].dtype != spec.dtype]
    if not (missing or surplus or shapes or dtypes):
        return []
    cure = repair(config, {name: (entry.shape, entry.dtype) for name, entry in found.items()})
    # One tensor of another shape is that tensor's fault rather than the config's.
    single = len(shapes) == 1 and not (missing or surplus or dtypes)
    if cure is not None:
        field, value = cure
        if field in failed or (field == "num_target_layers" and "target_layer_ids" in failed):
            return []  # the rule that failed has said it
        if not single:
            return [_contradiction(config, field, value, _first_sign(specs, found, missing, surplus, shapes, dtypes))]
    kinds = {"missing": missing, "surplus": surplus, "shape": shapes, "dtype": dtypes}
    return [_tensor_finding(kind, names, specs, found) for kind, names in kinds.items() if names]


def _contradiction(config: dict[str, Any], field: str, value: Any, sign: str) -> Finding:
    here = value_of(config, field)
    stated = "not stated" if here is None else describe(here)
    return error(
        "config.contradicts_weights",
        field,
        f"config.json: {field} is {stated}, but the weights are those of {describe(value)}",
        sign,
        f"set {field} to {describe(value)} if these are the weights you want; if not, fetch both again",
    )


def _first_sign(
    specs: dict[str, TensorSpec],
    found: dict[str, TensorEntry],
    missing: list[str],
    surplus: list[str],
    shapes: list[str],
    dtypes: list[str],
) -> str:
    if shapes:
        name, more = shapes[0], f" (and {len(shapes) - 1} more differ likewise)" if len(shapes) > 1 else ""
        return f"{name} has shape {list(found[name].shape)}, the config asks for {list(specs[name].shape)}{more}"
    if missing or surplus:
        parts = [f"{len(missing)} tensors that the config asks for are missing ({missing[0]})"] if missing else []
        parts += [f"{len(surplus)} tensors have no place ({surplus[0]})"] if surplus else []
        return " and ".join(parts)
    return f"{len(dtypes)} tensors are {found[dtypes[0]].dtype}, the config asks for {specs[dtypes[0]].dtype}"


def _tensor_finding(
    kind: str, names: list[str], specs: Mapping[str, TensorSpec], found: Mapping[str, TensorEntry]
) -> Finding:
    name = names[0][:200]
    more = ""
    if len(names) > 1:
        more = f" ({len(names) - 1} more likewise: {', '.join(n[:80] for n in names[1:4])}{' …' * (len(names) > 4)})"
    match kind:
        case "missing":
            what, why = f"the tensor {name} is missing{more}", "config.json asks for it; the draft cannot be built"
        case "surplus":
            what = f"the tensor {name} has no place in this draft{more}"
            why = "config.json does not ask for it: these are the weights of another network"
        case "shape":
            what = f"the tensor {name} has shape {list(found[names[0]].shape)}{more}"
            why = f"config.json asks for {list(specs[name].shape)} ({', '.join(specs[name].terms)})"
        case _:
            what = f"the tensor {name} has dtype {found[names[0]].dtype}{more}"
            why = f"config.json's torch_dtype asks for {specs[name].dtype}"
    return error(f"tensor.{kind}", name, what, why, _MISFIT)


def _judge_head(config: dict[str, Any], spec: TensorSpec, stored: TensorEntry) -> list[Finding]:
    if value_of(config, "tie_word_embeddings"):
        return [
            error(
                "config.tied",
                "tie_word_embeddings",
                "config.json: tie_word_embeddings is true, but there is an lm_head of its own",
                "an engine that believes the config ignores that file and takes the embedding as the output layer",
                "set tie_word_embeddings to false, as in the published config.json",
            )
        ]
    if stored.shape != spec.shape:
        return [_tensor_finding("shape", [LM_HEAD], {LM_HEAD: spec}, {LM_HEAD: stored})]
    if stored.dtype != spec.dtype:
        return [_tensor_finding("dtype", [LM_HEAD], {LM_HEAD: spec}, {LM_HEAD: stored})]
    return []


def _missing_head(spec: TensorSpec, header: Header | None) -> Finding:
    if header is not None:
        return error(
            "tensor.missing",
            LM_HEAD,
            f"{LM_HEAD_FILE} does not hold {LM_HEAD}",
            f"it holds {', '.join(name[:80] for name in list(header.tensors)[:3]) or 'nothing'}",
            "fetch it again",
        )
    return error(
        "lm_head.missing",
        LM_HEAD_FILE,
        f"{LM_HEAD_FILE} is missing",
        f"tie_word_embeddings is false, so the output layer is a file of its own, of {file_bytes([spec]):,} bytes",
        "run `k3dspark fetch --repull --to DIR`; an engine that takes the target's lm_head can do without it",
    )
