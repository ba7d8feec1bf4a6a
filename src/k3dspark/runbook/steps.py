"""The steps of the founding checklist, in its order. Each is one function from the workshop to an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from k3dspark.acceptance.inputs import built_in, fitting, parse_lengths
from k3dspark.acceptance.local import Local
from k3dspark.acceptance.run import Plan
from k3dspark.acceptance.run import accept as compare
from k3dspark.acceptance.verdict import FINDINGS
from k3dspark.checkpoint.fields import rope_parameters
from k3dspark.checkpoint.findings import Finding
from k3dspark.checkpoint.inspection import Inspection, inspect_checkpoint
from k3dspark.checkpoint.manifest import manifest_findings, read_manifest, sha256_file
from k3dspark.deploy.checklist import judge
from k3dspark.deploy.facts import Request, gather, guess_device
from k3dspark.deploy.items import counts, word
from k3dspark.diagnosis.experiment import ExperimentSettings, experiment
from k3dspark.diagnosis.subject import open_subject
from k3dspark.embedded.pair import ModelPair, load_pair
from k3dspark.model.draft import K3DSparkModel
from k3dspark.runbook.asked import Asked
from k3dspark.runbook.outcome import Fact, Outcome, Status, flat
from k3dspark.runbook.watching import watched
from k3dspark.training.measure import EvaluationPrompt, MeasureSettings, groups, measure

HASHED: Final = (".safetensors", ".json")
TAP_CHANGES: Final = ("taps_early", "taps_late", "one_tap", "tap_order", "tap_stream")
MAPPED_PROMPTS, MEASURED_PROMPTS = 20, 12
CACHE_ROWS: Final = 24  # context rows computed whole and in pieces, held in blocks
PIECE, BLOCK = 5, 8
ROUNDING: Final = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of rows near 1


class Workshop:
    """What the steps share: the settings, and the pair, loaded when the first step needs it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._pair: ModelPair | None = None

    def pair(self) -> ModelPair:
        """Raises `BadInput` when it cannot be loaded, each time it is asked for."""
        if self._pair is None:
            self._pair = load_pair(self.asked.target, self.asked.draft_directory, dtype=self.asked.dtype)
        return self._pair

    def draft(self) -> K3DSparkModel:
        draft = self.pair().draft
        assert draft is not None
        return draft


def fetch(shop: Workshop) -> Outcome:
    """The files are those that were fetched."""
    directory = shop.asked.draft_directory
    inspect_checkpoint(directory)  # refuses what is no checkpoint
    files = sorted(path for path in directory.iterdir() if path.suffix in HASHED and path.is_file())
    manifest = read_manifest(directory)
    faults = manifest_findings(directory, verify=True) if manifest is not None else []
    # What is as it was fetched was hashed just now: gigabytes are not read twice.
    known = {file.path: file.sha256 for file in manifest.files} if manifest is not None else {}
    for fault in faults:
        known.pop(fault.subject, None)
    facts: dict[str, Fact] = {}
    for path in files:
        facts[f"{path.name}.bytes"] = path.stat().st_size
        facts[f"{path.name}.sha256"] = known.get(path.name) or sha256_file(path)
    if manifest is None:
        return Outcome(
            "warn", f"{len(files)} files hashed; there is no record of a fetch to hold them against", facts,
            ("run `k3dspark fetch --repull --to DIR SOURCE` to verify them against their source",),
        )  # fmt: skip
    facts |= {"source": manifest.source, "revision": manifest.revision}
    return _judged(faults, f"{len(manifest.files)} files as they were fetched", facts)


def inspect(shop: Workshop) -> Outcome:
    """Config and tensors agree with each other and with the target."""
    found: Inspection = inspect_checkpoint(shop.asked.draft_directory, shop.asked.target_directory)
    facts = flat(found.config or {}, "config")
    facts |= {"tensors": found.found.tensors, "parameters": found.found.parameters, "bytes": found.found.bytes}
    return _judged(list(found.findings), f"{found.found.tensors} tensors, as config.json asks for", facts)


def check(shop: Workshop) -> Outcome:
    """This node is fit."""
    device = guess_device()
    items = judge(gather(Request(shop.asked.draft_directory, shop.asked.target_directory, device)))
    total = counts(items)
    facts: dict[str, Fact] = {"device": device}
    facts |= {f"{item.id}{' ' if item.subject else ''}{item.subject}": item.status for item in items}
    worded = [word(item, "en") for item in items if item.status in ("warn", "fail")]
    advice = tuple(f"{line.title}: {line.evidence}. {line.remedy}" for line in worded)
    status: Status = "fail" if total["fail"] else "warn" if total["warn"] else "pass"
    return Outcome(status, f"{total['pass']} pass, {total['warn']} warn, {total['fail']} fail", facts, advice)


def load(shop: Workshop) -> Outcome:
    """Both models load, and every weight of the draft is a number."""
    pair, draft = shop.pair(), shop.draft()
    broken = [name for name, tensor in draft.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    facts: dict[str, Fact] = {
        "target": pair.name,
        "target.vocabulary": pair.target.vocab_size,
        "target.hidden_size": pair.target.hidden_size,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "draft.parameters": sum(tensor.numel() for tensor in draft.state_dict().values()),
    }
    if broken:
        return Outcome(
            "fail", f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}", facts, ("fetch them again",)
        )
    return Outcome("pass", f"{pair.name} and its draft of {facts['draft.parameters']:,} parameters", facts)


def map_layers(shop: Workshop) -> Outcome:
    """The taps are those that the draft learnt, by experiment."""
    asked = shop.asked
    subject = open_subject(asked.target, asked.draft, asked.dtype)
    found = experiment(
        subject,
        asked.texts()[:MAPPED_PROMPTS],
        ExperimentSettings(asked.new_tokens, seed=asked.seed, changes=TAP_CHANGES),
    )
    facts: dict[str, Fact] = {
        "taps": ", ".join(str(tap.layer) for tap in subject.wiring.taps),
        "stream": subject.wiring.taps[0].stream,
        "verdict": found.verdict,
        "acceptance_length": round(found.length, 3),
        "context_gain_nats": round(found.context_gain, 3),
    }
    if found.causes:
        cause = found.causes[0].candidate
        return Outcome(
            "fail", f"acceptance comes back with {cause.detail} ({cause.change})", facts,
            ("run `k3dspark diagnose --draft DIR --target DIR`",),
        )  # fmt: skip
    if found.verdict == "unexplained":
        return Outcome(
            "fail", f"acceptance length {found.length:.2f}: the taps bring next to nothing, in any order or layer",
            facts, ("run `k3dspark diagnose --draft DIR --target DIR`: it changes everything else, too",),
        )  # fmt: skip
    return Outcome("pass", f"no other layers or order accept more than {found.length:.2f}", facts)


def cache(shop: Workshop) -> Outcome:
    """Context rows do not depend on how they were computed, weigh what they should, and YaRN is whole."""
    draft = shop.draft()
    config = draft.config
    generator = torch.Generator().manual_seed(shop.asked.seed)
    taps = torch.randn(CACHE_ROWS, config.context_width, generator=generator).to(draft.dtype)
    positions = torch.arange(CACHE_ROWS)
    with torch.no_grad():
        whole = draft.context_rows(taps, positions)
        parts = zip(taps.split(PIECE), positions.split(PIECE), strict=True)
        pieces = torch.cat([draft.context_rows(*part) for part in parts], 1)
    held = draft.new_cache(block_tokens=BLOCK)
    held.append(pieces)
    stored = torch.stack([torch.cat(held.chunks(layer)) for layer in range(held.layers)])
    error = float((whole - stored).abs().max() / whole.abs().max().clamp(min=1e-9))
    rope = rope_parameters(config.mapping())
    facts: dict[str, Fact] = {
        "bytes_per_token": held.bytes_per_token,
        "bytes_at_full_context": held.bytes_per_token * config.max_position_embeddings,
        "softmax_scale": round(config.softmax_scale, 7),
        "rope_multiplier": round(config.rope_multiplier, 7),
        **flat(rope, "rope"),
    }
    if error > ROUNDING.get(draft.dtype, 5e-2):
        return Outcome(
            "fail", f"rows computed in pieces differ from those computed whole by {error:.2g}", facts,
            ("a prefix cache or a chunked prompt would lose acceptance: report this",),
        )  # fmt: skip
    return Outcome("pass", f"{held.bytes_per_token:,} bytes a token; the same in any pieces", facts)


def confidence(shop: Workshop) -> Outcome:
    """The confidence head is on, and says what happens."""
    prompts = [
        EvaluationPrompt("runbook", text, number) for number, text in enumerate(shop.asked.texts()[:MEASURED_PROMPTS])
    ]
    head = shop.draft().confidence_head is not None
    settings = MeasureSettings(max_new_tokens=shop.asked.new_tokens, seed=shop.asked.seed)
    whole = groups(measure(shop.pair(), prompts, settings), head, shop.asked.seed)[0]
    facts: dict[str, Fact] = {
        "acceptance_length": round(whole.stats.acceptance_length, 3),
        "acceptance_rate": round(whole.stats.acceptance_rate, 3),
        "confidence_head": head,
    }
    facts |= {f"slot_{k}": round(share, 3) for k, share in enumerate(whole.stats.per_slot_acceptance, 1)}
    if not head:
        return Outcome(
            "warn", "the draft has no confidence head: its length cannot follow the text", facts,
            ("choose a fixed draft length with `k3dspark tune`",),
        )  # fmt: skip
    survival = whole.confidence.survival if whole.confidence is not None else None
    if survival is not None:
        facts |= {"survival_ece": round(survival.ece, 3)}
        facts |= {"survival_auroc": None if survival.auroc is None else round(survival.auroc, 3)}
    length = whole.stats.acceptance_length
    return Outcome("pass", f"acceptance length {length:.2f} over {whole.stats.rounds} rounds", facts)


def accept(shop: Workshop) -> Outcome:
    """Speculative and plain decoding give the same tokens."""
    pair, asked = shop.pair(), shop.asked
    plain, speculative = Local(pair, with_draft=False), Local(pair, with_draft=True)
    lengths, notes = fitting(parse_lengths(asked.lengths), pair.target.max_positions, asked.new_tokens)
    inputs = built_in(lengths, asked.per_length, asked.new_tokens, plain.codec(), chat=plain.chats)
    found = compare(plain, speculative, inputs, Plan(cache=False))
    facts: dict[str, Fact] = {
        "outcome": found.verdict.outcome.value,
        "tokens": found.verdict.tokens,
        "mismatches": found.verdict.mismatches,
        "lengths": ", ".join(str(length) for length in lengths),
    }
    advice = (*notes, *(FINDINGS[name] for name in found.verdict.findings))
    return Outcome("pass" if found.verdict.accepted else "fail", found.verdict.meaning, facts, advice)


def monitor(shop: Workshop) -> Outcome:
    """An engine's metrics tell acceptance and throughput."""
    found = watched(shop.asked, shop.pair)
    facts: dict[str, Fact] = {
        "engine": found.engine,
        "model": found.model,
        "missing": ", ".join(found.missing),
        "acceptance_length": None if found.length is None else round(found.length, 3),
    }
    figures: dict[str, Fact] = {"tokens_per_second": found.tokens_per_second, "utilisation": found.utilisation}
    if found.length is None:
        return Outcome(
            "warn", "the engine answers, but no round was drafted while it was watched", facts,
            ("watch it under load: `k3dspark monitor URL`",), figures,
        )  # fmt: skip
    return Outcome("pass", f"acceptance length {found.length:.2f} by the engine's own counters", facts, (), figures)


STEPS: Final[Mapping[str, Callable[[Workshop], Outcome]]] = {
    "fetch": fetch,
    "inspect": inspect,
    "check": check,
    "load": load,
    "map": map_layers,
    "cache": cache,
    "confidence": confidence,
    "accept": accept,
    "monitor": monitor,
}


def _judged(findings: list[Finding], good: str, facts: Mapping[str, Fact]) -> Outcome:
    errors = [finding for finding in findings if finding.level == "error"]
    advice = tuple(f"{finding.what}: {finding.why}. {finding.remedy}" for finding in findings)
    if errors:
        return Outcome("fail", f"{errors[0].subject}: {errors[0].what}", facts, advice)
    return Outcome("warn" if findings else "pass", good, facts, advice)
