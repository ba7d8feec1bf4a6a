"""One whole comparison: cold, warm and control runs, what divides, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import uuid4

from k3dspark.acceptance import sampled
from k3dspark.acceptance.asking import Answer, Generator, Question, Sampling, Source
from k3dspark.acceptance.classify import Divergence, Kind, classify, prompts_agree, same
from k3dspark.acceptance.inputs import Input, InputSet
from k3dspark.acceptance.numerics import FEW, Numerics, allowance, common, moves, off_best
from k3dspark.acceptance.verdict import Tally, Verdict, decide, numeric_findings

RESUMES = 4  # times an answer is taken up again behind a divergence
SAMPLES_SHOW = 0.003  # share of tokens that are not the side's own best, from which it is called sampled
MANY, OTHER_MODEL = 3, 0.1  # mismatches, and their share of tokens, from which two models are called different
STOP_PROBES = 2
STOP_LENGTH = 5  # characters of a stop string taken from an answer
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Plan:
    """`concurrency` inputs are asked together, in the same company on both sides. `tie_limit` in nats."""

    concurrency: int = 1
    greedy: bool = True
    cache: bool = True
    control: bool = True
    tie_limit: float = 0.5
    draws: int = 0  # of every sampled prompt from each side; 0: no sampling tests
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, seed=0))
    alpha: float = 0.01


@dataclass
class Runs:
    """Answers of one side by run, each in the order of the inputs; `warm` and `control` may be empty."""

    cold: list[Answer] = field(default_factory=list)
    warm: list[Answer] = field(default_factory=list)
    control: list[Answer] = field(default_factory=list)

    def repeated(self, index: int) -> list[Answer]:
        """All answers to one input, the cold one first."""
        return [run[index] for run in (self.cold, self.warm, self.control) if run]

    @property
    def cached(self) -> int | None:
        """Prompt tokens of the warm run that came from the cache; None when the side does not say."""
        told = [answer.cached for answer in self.warm if answer.cached is not None]
        return sum(told) if told else None


@dataclass(frozen=True)
class Acceptance:
    """Everything that a report needs."""

    baseline: str
    candidate: str
    inputs: InputSet
    plan: Plan
    tallies: tuple[Tally, ...]
    divergences: tuple[Divergence, ...]
    control: Numerics | None
    numerics: Numerics | None
    allowed: float
    tests: tuple[sampled.SampledTest, ...]
    sources: tuple[Source, Source]
    cached: tuple[int | None, int | None]
    verdict: Verdict


def accept(
    baseline: Generator,
    candidate: Generator,
    inputs: InputSet,
    plan: Plan,
    done: Callable[[str], None] = lambda _: None,
) -> Acceptance:
    """Hold `candidate` against `baseline`; `done` hears of each finished batch. Raises `EngineFault` if a side dies."""
    asked = list(inputs.inputs) if plan.greedy else []
    ours = _runs(baseline, asked, plan, plan.control, lambda: done("baseline"))
    theirs = _runs(candidate, asked, plan, False, lambda: done("candidate"))
    probes = _stop_probes(asked, ours.cold)
    ours_probed, theirs_probed = (
        side.ask([p.question for p in probes]) if probes else [] for side in (baseline, candidate)
    )

    control = Numerics.of(
        m for i in range(len(asked)) for other in ours.repeated(i)[1:] for m in moves(ours.cold[i], other)
    )
    between = Numerics.of(
        m for i in range(len(asked)) for other in theirs.repeated(i) if prompts_agree(ours.cold[i], other)
        for m in moves(ours.cold[i], other)
    )  # fmt: skip
    allowed = allowance([control, between], plan.tie_limit)

    tallies, divergences = _compare(asked, ours, theirs, probes, ours_probed, theirs_probed, allowed)
    resumed = _resume(candidate, asked, ours, divergences, allowed, plan.concurrency)
    tallies += resumed[0]
    divergences += resumed[1]
    divergences = _conversations(asked, divergences, ours, theirs)

    findings = _findings(ours, theirs, resumed[2], divergences, allowed)
    findings += numeric_findings(control, between)
    if plan.greedy and not probes:
        findings.append("no_stop_probe")
    if plan.greedy and plan.cache:
        findings += _cache_findings(baseline, candidate, ours, theirs)
    divergences = _causes(divergences, "candidate_sampled" in findings)
    wrong = sum(d.kind is Kind.MISMATCH and d.cause != "sampled" for d in divergences)
    if wrong >= MANY and wrong > OTHER_MODEL * sum(tally.tokens for tally in tallies):
        findings.append("other_model")
    tests = (
        sampled.compare_sampled(
            baseline, candidate, _to_sample(inputs), plan.draws, plan.sampling, lambda: done("draws")
        )
        if plan.draws
        else []
    )
    return Acceptance(
        baseline=baseline.name,
        candidate=candidate.name,
        inputs=inputs,
        plan=plan,
        tallies=tuple(tallies),
        divergences=tuple(divergences),
        control=control,
        numerics=between,
        allowed=allowed,
        tests=tuple(tests),
        sources=(_source(ours), _source(theirs)),
        cached=(ours.cached, theirs.cached),
        verdict=decide(tallies, divergences, tests, findings, plan.alpha),
    )


def _runs(side: Generator, inputs: Sequence[Input], plan: Plan, control: bool, done: Callable[[], None]) -> Runs:
    """Batch by batch: cold, at once again with the same salt (warm), and once more as new (control)."""
    runs = Runs()
    warm = plan.cache and side.has_cache is not False
    for batch in _batches(inputs, plan.concurrency):

        def fresh(batch: tuple[Input, ...] = batch) -> list[Question]:
            return [replace(given.question, salt=uuid4().hex) for given in batch]

        questions = fresh()
        runs.cold += side.ask(questions)
        if warm:
            runs.warm += side.ask(questions)
        if control:
            runs.control += side.ask(fresh())
        done()
    return runs


def _batches(things: Sequence[Thing], size: int) -> Iterator[tuple[Thing, ...]]:
    for start in range(0, len(things), size):
        yield tuple(things[start : start + size])


def _compare(
    inputs: Sequence[Input], ours: Runs, theirs: Runs,
    probes: Sequence[Input], ours_probed: Sequence[Answer], theirs_probed: Sequence[Answer], allowed: float,
) -> tuple[list[Tally], list[Divergence]]:  # fmt: skip
    tallies, divergences = [], []
    for run, answers in (("cold", theirs.cold), ("warm", theirs.warm)):
        for group in dict.fromkeys(given.group for given in inputs if answers):
            members = [i for i, given in enumerate(inputs) if given.group == group]
            found = [classify(inputs[i], run, ours.repeated(i), answers[i], allowed) for i in members]
            tallies.append(_tally(group, run, [(ours.cold[i], answers[i]) for i in members], found))
            divergences += [d for d in found if d is not None]
    if probes:
        pairs = list(zip(ours_probed, theirs_probed, strict=True))
        found = [classify(p, "stop", [a], b, allowed) for p, (a, b) in zip(probes, pairs, strict=True)]
        # An answer that already divides without the stop string says nothing new about stopping.
        known = {d.input for d in divergences}
        found = [None if d is not None and d.kind is not Kind.STOP and d.input in known else d for d in found]
        tallies.append(_tally("stop", "stop", pairs, found))
        divergences += [d for d in found if d is not None]
    return tallies, divergences


def _tally(group: str, run: str, pairs: Sequence[tuple[Answer, Answer]], found: Sequence[Divergence | None]) -> Tally:
    identical = sum(same(a, b) for a, b in pairs)
    tokens = 0
    for (a, b), divergence in zip(pairs, found, strict=True):
        shared = common(a.token_ids, b.token_ids)
        if divergence is None or divergence.kind is not Kind.PROMPT:
            tokens += min(shared + 1, max(len(a.token_ids), len(b.token_ids))) if divergence is not None else shared
    return Tally(group, run, len(pairs), identical, tokens)


def _resume(
    side: Generator, inputs: Sequence[Input], ours: Runs, divergences: Sequence[Divergence], allowed: float,
    concurrency: int,
) -> tuple[list[Tally], list[Divergence], list[Answer]]:  # fmt: skip
    """Take diverged answers up again behind the baseline's token, so that one token does not hide the rest."""
    index = {given.name: i for i, given in enumerate(inputs)}
    open_at = {index[d.input]: d.at for d in divergences if d.run == "cold" and d.kind in (Kind.TIE, Kind.MISMATCH)}
    found: list[Divergence] = []
    answers: list[Answer] = []
    tokens = asked = identical = 0
    for _ in range(RESUMES):
        pending = []
        for i, at in open_at.items():
            answer, prompt = ours.cold[i], inputs[i].question.token_ids or ours.cold[i].prompt_ids
            if prompt is not None and at + 1 < len(answer.token_ids):
                left = len(answer.token_ids) - at - 1
                question = replace(inputs[i].question, text=None, messages=None, max_tokens=left,
                                   token_ids=(*prompt, *answer.token_ids[: at + 1]))  # fmt: skip
                pending.append((i, at + 1, question))
        if not pending:
            break
        fresh: list[Answer] = []
        for batch in _batches(pending, concurrency):
            fresh += side.ask([question for _, _, question in batch])
        answers += fresh
        open_at = {}
        for (i, start, _), answer in zip(pending, fresh, strict=True):
            rest = _tail(ours.cold[i], start)
            shared = common(rest.token_ids, answer.token_ids)
            asked += 1
            if shared >= min(len(rest.token_ids), len(answer.token_ids)):
                identical += 1
                tokens += shared
                continue
            tokens += shared + 1
            given = replace(inputs[i], group="resumed")
            divergence = classify(
                given, "resumed", [replace(rest, prompt_tokens=None, prompt_ids=None)], answer, allowed
            )
            if divergence is not None:
                found.append(replace(divergence, at=start + shared))
                open_at[i] = start + shared
    return ([Tally("resumed", "cold", asked, identical, tokens)] if asked else []), found, answers


def _tail(answer: Answer, start: int) -> Answer:
    return replace(answer, token_ids=answer.token_ids[start:], scores=answer.scores[start:])


def _stop_probes(inputs: Sequence[Input], answers: Sequence[Answer]) -> list[Input]:
    """Inputs asked again with a stop string out of the baseline's own answer, so that it certainly stops there."""
    probes: list[Input] = []
    for given, answer in sorted(zip(inputs, answers, strict=True), key=lambda pair: pair[1].prompt_tokens or 0):
        if len(probes) == STOP_PROBES:
            break
        stop = _stop_string(answer.text)
        if stop is not None:
            question = replace(given.question, stop=(stop,))
            probes.append(Input(given.name, "stop", question))
    return probes


def _stop_string(text: str) -> str | None:
    """A few whole characters of a text that stand nowhere before, from its middle on, or else nearer to its start."""
    middle = len(text) * 3 // 5
    for length in range(STOP_LENGTH, 0, -1):
        for start in (*range(middle, len(text) - length), *range(middle - 1, 0, -1)):
            stop = text[start : start + length]
            if len(stop) == length and "\ufffd" not in stop and stop.strip() and text.find(stop) == start:
                return stop
    return None


def _conversations(
    inputs: Sequence[Input], divergences: Sequence[Divergence], ours: Runs, theirs: Runs
) -> list[Divergence]:
    """Mismatches of conversations only, where prompts given as ids agree, are the template's or the tokenizer's."""
    by_name = {given.name: (i, given) for i, given in enumerate(inputs)}
    ids = [given.name for given in inputs if given.by_ids]
    wrong = {d.input for d in divergences if d.kind is Kind.MISMATCH}
    if not ids or wrong & set(ids):
        return list(divergences)
    result = []
    for d in divergences:
        i, given = by_name.get(d.input, (0, None))
        unknown = given is not None and not given.by_ids and (
            ours.cold[i].prompt_ids is None or theirs.cold[i].prompt_ids is None
        )  # fmt: skip
        if d.kind is Kind.MISMATCH and unknown:
            evidence = f"{len(ids)} prompts given as ids agree, this one, which each side renders itself, does not"
            d = replace(d, kind=Kind.PROMPT, evidence=f"{evidence}; {d.evidence}")
        result.append(d)
    return result


def _findings(
    ours: Runs, theirs: Runs, resumed: Sequence[Answer], divergences: Sequence[Divergence], allowed: float
) -> list[str]:
    findings = []
    if _samples(off_best([*ours.cold, *ours.warm, *ours.control])):
        findings.append("baseline_sampled")
    if _samples(off_best([*theirs.cold, *theirs.warm, *resumed])):
        findings.append("candidate_sampled")
    for i, first in enumerate(ours.cold):
        for other in ours.repeated(i)[1:]:
            own = classify(Input("", "", Question()), "control", [first], other, allowed)
            if own is not None and own.kind not in (Kind.TIE, Kind.VARIANCE) and first.scores and other.scores:
                findings.append("baseline_unsteady")
    if Source.TEXT in (_source(ours), _source(theirs)) and divergences:
        findings.append("retokenized")
    return list(dict.fromkeys(findings))


def _samples(counted: tuple[int, int]) -> bool:
    off, known = counted
    return off >= 3 and known >= FEW and off / known >= SAMPLES_SHOW


def _cache_findings(baseline: Generator, candidate: Generator, ours: Runs, theirs: Runs) -> list[str]:
    findings = []
    able = baseline.has_cache is not False or candidate.has_cache is not False
    if able and not ours.cached and not theirs.cached:
        findings.append("cache_unseen")
    if any(answer.cached for run in (ours.cold, theirs.cold) for answer in run):
        findings.append("not_cold")
    return findings


def _causes(divergences: Sequence[Divergence], sampled_candidate: bool) -> list[Divergence]:
    """What kind of mismatch it is, where that can be told."""
    wrong = [d for d in divergences if d.kind is Kind.MISMATCH]
    inputs = {d.input for d in wrong}
    result = []
    for d in divergences:
        if d.kind is Kind.MISMATCH and sampled_candidate:
            d = replace(d, cause="sampled")
        elif d.kind is Kind.MISMATCH and len(inputs) == len(wrong) == 1:
            d = replace(d, cause="isolated")
        result.append(d)
    return result


def _source(runs: Runs) -> Source:
    """The weakest source that any answer came from."""
    order = [Source.IDS, Source.LOGPROBS, Source.TEXT]
    return max(
        (answer.source for answer in [*runs.cold, *runs.warm, *runs.control]), key=order.index, default=Source.IDS
    )


def _to_sample(inputs: InputSet) -> list[Input]:
    """The shortest inputs: what is sampled hundreds of times should be cheap to read."""

    def size(given: Input) -> int:
        question = given.question
        return len(question.token_ids or ()) or len(question.text or "") // 3 or 50

    return sorted(inputs.inputs, key=size)
