"""`judge`: facts in, the checklist out. Pure: the same facts always give the same items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from k3dspark.checkpoint.fields import rope_parameters
from k3dspark.checkpoint.findings import Finding
from k3dspark.deploy.cluster_checks import host_items, node_items
from k3dspark.deploy.device_checks import device_items
from k3dspark.deploy.facts import Facts
from k3dspark.deploy.items import Item, Status
from k3dspark.deploy.software_checks import software_items

# Which line of the checklist a finding of `inspect` belongs to, by the start of its id; the first that fits.
_AREAS: Final = (
    ("target.special_ids", "target.token_ids"),
    ("target.rope", "target.yarn"),
    ("target.rotated", "target.embeddings"),
    ("target.embed_tokens", "target.embeddings"),
    ("target.lm_head", "target.embeddings"),
    ("target.", "target.geometry"),
    ("rule.", "draft.config"),
    ("config.", "draft.config"),
    ("identity.", "draft.config"),
    ("tensor.", "draft.tensors"),
    ("lm_head.", "draft.tensors"),
    ("manifest.", "draft.source"),
    ("", "draft.files"),
)
# A long context in target and draft must be placed alike, or acceptance is gone: here that is no mere warning.
_STRICT: Final = ("target.rope",)


def judge(facts: Facts) -> tuple[Item, ...]:
    """Every line of the checklist, in reading order."""
    return (
        *_draft_items(facts),
        *_target_items(facts),
        *device_items(facts),
        *software_items(facts),
        *host_items(facts),
        *node_items(facts),
    )


def _findings(facts: Facts, line: str) -> list[Finding]:
    return [finding for finding in facts.draft.findings if _line_of(finding) == line]


def _line_of(finding: Finding) -> str:
    return next(line for start, line in _AREAS if finding.id.startswith(start))


def _found(facts: Facts, line: str) -> list[Item]:
    return [_as_item(finding, line) for finding in _findings(facts, line)]


def _as_item(finding: Finding, line: str) -> Item:
    status: Status = "fail" if finding.level == "error" or finding.id in _STRICT else "warn"
    values = {"what": finding.what, "why": finding.why, "remedy": finding.remedy, "id": finding.id}
    return Item(line, status, "finding", values)


# -- the draft ------------------------------------------------------------------------------------------------------


def _draft_items(facts: Facts) -> Iterator[Item]:
    """The draft as `inspect` sees it: one passing line an area, or one line a finding."""
    draft = facts.draft
    weights = [file for file in draft.files if file.kind == "weights"]
    size = sum(file.bytes for file in weights)
    yield from _found(facts, "draft.files") or [
        Item("draft.files", "pass", "draft.files", {"count": len(weights), "bytes": size})
    ]
    rules = [verdict for verdict in draft.verdicts if verdict.status == "pass"]
    names = draft.public.names if draft.public else ()
    yield from _found(facts, "draft.config") or [
        Item("draft.config", "pass", "draft.config", {"count": len(rules), "known": ", ".join(names) or "–"})
    ]
    expected = draft.expected
    if found := _found(facts, "draft.tensors"):
        yield from found
    elif expected is None or any(item.status == "fail" for item in _found(facts, "draft.files")):
        yield Item("draft.tensors", "na", "draft.tensors.unknown")
    else:
        yield Item(
            "draft.tensors",
            "pass",
            "draft.tensors",
            {"tensors": draft.found.tensors, "parameters": draft.found.parameters, "bytes": draft.found.bytes},
        )
    yield from _found(facts, "draft.source") or [_source_item(facts)]


def _source_item(facts: Facts) -> Item:
    from k3dspark.checkpoint.manifest import MANIFEST

    recorded = (facts.draft.directory / MANIFEST).is_file()
    return Item("draft.source", "pass", "draft.source") if recorded else Item("draft.source", "na", "draft.source.none")


# -- the target -----------------------------------------------------------------------------------------------------


def _target_items(facts: Facts) -> Iterator[Item]:
    """Present, complete, and the one that the draft was made for."""
    lines = ("target.geometry", "target.token_ids", "target.yarn", "target.embeddings")
    if facts.target is None:
        if facts.target_problem is not None:
            problem = facts.target_problem
            values = {"what": problem.what, "why": problem.why, "remedy": problem.remedy, "id": "target.config"}
            yield Item("target.complete", "fail", "finding", values)
        else:
            yield Item("target.complete", "warn", "target.none")
        yield from (Item(line, "na", "target.uncompared") for line in lines)
        return
    yield from _completeness(facts)
    geometry_broken = any(item.status == "fail" for item in _found(facts, "target.geometry"))
    for line in lines:
        if found := _found(facts, line):
            yield from found
        elif facts.draft.config is None or (geometry_broken and line != "target.geometry"):
            yield Item(line, "na", "target.uncompared")
        else:
            yield _agreeing(facts, line)


def _completeness(facts: Facts) -> Iterator[Item]:
    target = facts.target
    assert target is not None
    values: dict[str, object] = {
        "directory": str(target.directory),
        "layers": target.stated_layers,
        "found": len(target.layers),
        "shards": target.shards,
        "bytes": target.bytes,
    }
    for fault in target.faults[:10]:
        yield Item("target.complete", "fail", "target.shard", {"file": fault.file, "detail": fault.detail})
    if len(target.faults) > 10:
        yield Item("target.complete", "fail", "target.more", {"count": len(target.faults) - 10})
    if target.faults:
        return
    if target.stated_layers is None:
        yield Item("target.complete", "fail", "target.unstated", values)
    elif target.missing_layers:
        named = ", ".join(str(layer) for layer in target.missing_layers[:8])
        more = " …" if len(target.missing_layers) > 8 else ""
        yield Item("target.complete", "fail", "target.layers", {**values, "missing": named + more})
    else:
        yield Item("target.complete", "pass", "target.complete", values)


def _agreeing(facts: Facts, line: str) -> Item:
    """The passing line of a comparison, or why there was nothing to compare."""
    target, config = facts.target, facts.draft.config
    assert target is not None
    assert config is not None
    if line == "target.geometry":
        names = ("hidden_size", "num_hidden_layers", "vocab_size")
        values = {name: target.config.get(name) for name in names}
        return Item(line, "pass", line, {**values, "taps": config.get("target_layer_ids")})
    if line == "target.token_ids":
        ids = {name: config.get(f"{name}_token_id") for name in ("mask", "bos", "eos", "pad")}
        has_tokenizer = any((target.directory / n).is_file() for n in ("tokenizer_config.json", "tokenizer.json"))
        return Item(line, "pass" if has_tokenizer else "warn", line if has_tokenizer else f"{line}.no_tokenizer", ids)
    if line == "target.yarn":
        mine, theirs = rope_parameters(config), rope_parameters(target.config)
        if theirs.get("rope_type") != "yarn" or mine.get("rope_type") != "yarn":
            types = {"mine": mine.get("rope_type"), "theirs": theirs.get("rope_type")}
            return Item(line, "na", "target.yarn.none", types)
        names = ("factor", "original_max_position_embeddings", "rope_theta")
        return Item(line, "pass", line, {name: mine.get(name) for name in names})
    if not target.matrices:
        return Item(line, "na", "target.embeddings.none")
    return Item(line, "pass", line, {"matrices": ", ".join(sorted(target.matrices))})
