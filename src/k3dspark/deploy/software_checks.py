"""Engines and frameworks: whether one that is installed knows `K3DSparkModel`, and whether its parts fit together."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from k3dspark.deploy.engines import ENGINES, Engine, engine_of_distribution, parse_version
from k3dspark.deploy.facts import Facts
from k3dspark.deploy.items import Item, Status
from k3dspark.errors import BadInput

_FEATURE = "k3_mla_draft"
_PER_DEVICE = {"npu": ("vllm-ascend", "sglang"), "cuda": ("vllm", "sglang"), "cpu": ("vllm",)}


def software_items(facts: Facts) -> Iterator[Item]:
    """Engine lines, then frameworks."""
    if facts.python.problem:
        values = {"program": facts.python.program, "problem": facts.python.problem}
        yield Item("software.python", "fail", "software.python.silent", values)
        yield Item("software.engine", "na", "software.unread")
        yield Item("software.framework", "na", "software.unread")
        return
    where = facts.python.program or "k3dspark"
    yield Item("software.python", "pass", "software.python", {"version": facts.python.version, "program": where})
    yield from _engines(facts)
    yield from _frameworks(facts)


def _engines(facts: Facts) -> Iterator[Item]:
    installed = _installed(facts)
    if "vllm-ascend" in {engine.name for engine, _ in installed}:
        # It brings its own draft class and pins vLLM's version: vLLM is judged as its base, below.
        installed = [pair for pair in installed if pair[0].name != "vllm"]
    if not installed:
        names = ", ".join(ENGINES[name].title for name in _PER_DEVICE[facts.device])
        if facts.device == "cpu":
            yield Item("software.engine", "na", "software.engine.own", {"names": names})
        else:
            yield Item("software.engine", "warn", "software.engine.none", {"names": names, "wanted": _advice(facts)})
        return
    able = [engine.name for engine, version in installed if engine.support(_FEATURE).has(version)]
    for engine, version in installed:
        support = engine.support(_FEATURE)
        values = {"engine": engine.title, "version": str(version), "since": support.since, "why": support.why}
        # One engine that knows the draft is enough; another one beside it is then only a trap.
        status: Status = "warn" if able else "fail"
        if engine.name in able:
            newer = version > Version(engine.newest)
            yield Item(
                "software.engine",
                "pass",
                "software.engine.newer" if newer else "software.engine",
                {**values, "newest": engine.newest},
                engine.title,
            )
        elif support.since is None:
            others = {**values, "wanted": _advice(facts)}
            yield Item("software.engine", status, "software.engine.never", others, engine.title)
        else:
            yield Item("software.engine", status, "software.engine.old", values, engine.title)
    yield from _base(facts)


def _installed(facts: Facts) -> list[tuple[Engine, Version]]:
    found: dict[str, tuple[Engine, Version]] = {}
    for name, text in facts.python.distributions.items():
        engine = engine_of_distribution(name)
        if engine is None or engine.name in found:
            continue
        try:
            found[engine.name] = engine, parse_version(text)
        except BadInput:
            continue
    return list(found.values())


def _advice(facts: Facts) -> str:
    """Which engines serve this draft on this device, and since when."""
    known = [(ENGINES[name].title, ENGINES[name].support(_FEATURE).since) for name in _PER_DEVICE[facts.device]]
    return ", ".join(f"{title} {since}" for title, since in known if since is not None)


def _base(facts: Facts) -> Iterator[Item]:
    """vLLM-Ascend patches the vLLM of its own number."""
    plugin, base = (facts.python.distributions.get(name) for name in ("vllm-ascend", "vllm"))
    if plugin is None:
        return
    if base is None:
        yield Item("software.engine", "fail", "software.base.none", {"plugin": plugin}, "vLLM")
        return
    try:
        fits = parse_version(plugin).release[:2] == parse_version(base).release[:2]
    except BadInput:
        return
    if not fits:
        yield Item("software.engine", "fail", "software.base.other", {"plugin": plugin, "base": base}, "vLLM")


def _frameworks(facts: Facts) -> Iterator[Item]:
    have = facts.python.distributions
    torch, npu = have.get("torch"), have.get("torch-npu")
    listed = ", ".join(f"{name} {have[name]}" for name in ("torch", "torch-npu", "transformers") if name in have)
    if torch is None:
        yield Item("software.framework", "warn", "software.torch.none")
        return
    if facts.device != "npu":
        yield Item("software.framework", "pass", "software.framework", {"listed": listed})
        return
    if npu is None:
        yield Item("software.framework", "warn", "software.torch_npu.none", {"torch": torch})
        return
    try:
        fits = parse_version(torch).release[:2] == parse_version(npu).release[:2]
    except BadInput:
        fits = False
    if fits:
        yield Item("software.framework", "pass", "software.framework", {"listed": listed})
    else:
        yield Item("software.framework", "fail", "software.torch_npu.other", {"torch": torch, "npu": npu})
