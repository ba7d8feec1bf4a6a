"""`k3dspark accept`: whether a candidate says what a baseline says, token by token."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3dspark.cli import options
from k3dspark.cli.output import check_place, clean, print_json, table
from k3dspark.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from k3dspark.acceptance.asking import Codec, Generator
    from k3dspark.acceptance.inputs import InputSet
    from k3dspark.acceptance.run import Acceptance
    from k3dspark.embedded.pair import ModelPair

EMBEDDED, PLAIN = "embedded", "embedded-plain"
_SIDES, _INPUTS, _TESTS = "Sides", "Inputs", "Tests"


def accept(
    baseline: Annotated[
        str,
        typer.Option(
            metavar="A",
            help="What is right: URL, target directory, embedded or embedded-plain.",
            rich_help_panel=_SIDES,
        ),
    ] = PLAIN,
    candidate: Annotated[
        str, typer.Option(metavar="B", help="What is to be proved, named the same way.", rich_help_panel=_SIDES)
    ] = EMBEDDED,
    baseline_draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draft of a baseline directory.", rich_help_panel=_SIDES)
    ] = None,
    candidate_draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draft of a candidate directory.", rich_help_panel=_SIDES)
    ] = None,
    baseline_model: Annotated[
        str | None, typer.Option(metavar="ID", help="Which of the models that a URL serves.", rich_help_panel=_SIDES)
    ] = None,
    candidate_model: Annotated[
        str | None, typer.Option(metavar="ID", help="Which of the models that a URL serves.", rich_help_panel=_SIDES)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the servers; K3DSPARK_API_KEY otherwise.", rich_help_panel=_SIDES)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="tokenizer.json, where no side can lend one.", rich_help_panel=_SIDES),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the built-in prompts.", rich_help_panel=_INPUTS)
    ] = "1K,32K,128K",
    per_length: Annotated[
        int, typer.Option(min=1, max=100, help="Built-in prompts at each length.", rich_help_panel=_INPUTS)
    ] = 5,
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own, one a line, instead: text or JSON.", rich_help_panel=_INPUTS),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens of each answer.", rich_help_panel=_INPUTS)
    ] = 128,
    mode: Annotated[
        Literal["greedy", "sampled", "both"], typer.Option(help="What is compared.", rich_help_panel=_TESTS)
    ] = "greedy",
    cache: Annotated[
        Literal["both", "off"],
        typer.Option(
            help="Ask servers twice, so that the second time meets the prefix cache, or not.", rich_help_panel=_TESTS
        ),
    ] = "both",
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Hold the baseline against itself.", rich_help_panel=_TESTS)
    ] = True,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests at once, the same on both sides.", rich_help_panel=_TESTS)
    ] = 1,
    tie: Annotated[
        float, typer.Option(min=0, max=10, help="Nats: a wider gap is never a tie.", rich_help_panel=_TESTS)
    ] = 0.5,
    draws: Annotated[
        int, typer.Option(min=20, help="Sampled answers of each prompt and side.", rich_help_panel=_TESTS)
    ] = 200,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampled answers.", rich_help_panel=_TESTS)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Of sampled answers.", rich_help_panel=_TESTS)] = 1.0,
    alpha: Annotated[
        float, typer.Option(min=1e-6, max=0.5, help="Level of the sampling tests together.", rich_help_panel=_TESTS)
    ] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.", rich_help_panel=_TESTS)] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one answer of a server may take.")] = 1800.0,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Prove that a candidate gives the baseline's own tokens, and say why where it does not.

    Exit status: 0 identical, or every difference explained; 1 a real difference, or no usable baseline; 2 bad input;
    3 a side does not answer.
    """
    if report is not None:
        check_place(report)
    for name, side, draft, model in (
        ("baseline", baseline, baseline_draft, baseline_model),
        ("candidate", candidate, candidate_draft, candidate_model),
    ):
        _check_side(name, side, draft, model)

    from k3dspark.acceptance.asking import Sampling
    from k3dspark.acceptance.report import as_json as to_json
    from k3dspark.acceptance.report import write_page
    from k3dspark.acceptance.run import Plan
    from k3dspark.acceptance.run import accept as compare
    from k3dspark.cli.progress import Count

    opened = _Opened(options.api_key(api_key), timeout, concurrency, dtype, threads)
    with ExitStack() as stack:
        # The one with a draft first: a plain side can then share its target.
        sides = {"baseline": (baseline, baseline_draft, baseline_model),
                 "candidate": (candidate, candidate_draft, candidate_model)}  # fmt: skip
        order = sorted(sides, key=lambda name: sides[name][0] == PLAIN or sides[name][1] is None)
        generators: dict[str, Generator] = {}
        for name in order:
            generators[name] = opened.side(*sides[name])
            stack.callback(generators[name].close)
        ours, theirs = generators["baseline"], generators["candidate"]
        codec = _codec(tokenizer, ours, theirs)
        asked = _inputs(inputs, lengths, per_length, max_new_tokens, ours, theirs, codec)
        plan = Plan(
            concurrency=concurrency,
            greedy=mode != "sampled",
            cache=cache == "both",
            control=control,
            tie_limit=tie,
            draws=draws if mode != "greedy" else 0,
            sampling=Sampling(temperature, top_p, seed),
            alpha=alpha,
        )
        batches = -(-len(asked.inputs) // concurrency) * 2 if plan.greedy else 0
        with Count("batches", batches + (min(len(asked.inputs), 5) if plan.draws else 0)) as count:
            result = compare(ours, theirs, asked, plan, lambda _: count.add())
    if report is not None:
        write_page(report, result)
    if as_json:
        print_json(to_json(result))
    else:
        _print(result)
    if not result.verdict.accepted:
        raise typer.Exit(1)


def _check_side(name: str, side: str, draft: Path | None, model: str | None) -> None:
    """Raise `BadInput` for options that contradict each other, before anything is loaded."""
    url = _is_url(side)
    if draft is not None and (url or side in (EMBEDDED, PLAIN)):
        raise BadInput(f"--{name}-draft with --{name} {side}", "only a target directory takes a draft", "leave it out")
    if model is not None and not url:
        raise BadInput(f"--{name}-model with --{name} {side}", "only a server has models to choose", "leave it out")
    if not url and side not in (EMBEDDED, PLAIN) and not Path(side).is_dir():
        raise BadInput(
            f"--{name} {side} is not there", "it is no URL (http://HOST:PORT), no directory, and not the embedded pair",
            f"pass a URL, a target directory, {EMBEDDED} or {PLAIN}",
        )  # fmt: skip


def _is_url(side: str) -> bool:
    return side.startswith(("http://", "https://"))


@dataclass
class _Opened:
    """Opens sides; local ones of the same target share it, as both run the same kernels then."""

    api_key: str | None
    timeout: float
    concurrency: int
    dtype: options.DTypeName
    threads: int | None

    def __post_init__(self) -> None:
        self._pairs: dict[Path | None, ModelPair] = {}

    def side(self, name: str, draft: Path | None, model: str | None) -> Generator:
        if _is_url(name):
            from k3dspark.acceptance.server import open_server

            return open_server(
                name, model=model, api_key=self.api_key, timeout_seconds=self.timeout, concurrency=self.concurrency
            )
        from k3dspark.acceptance.local import Local

        embedded = name in (EMBEDDED, PLAIN)
        target = None if embedded else Path(name).resolve()
        pair = self._pairs.get(target)
        with_draft = name == EMBEDDED or draft is not None
        if pair is None or (with_draft and not embedded):
            plain = not embedded and draft is None
            pair = self._pairs[target] = options.load(target, draft, plain, self.dtype, self.threads)
        return Local(pair, with_draft=with_draft, concurrency=self.concurrency)


def _codec(tokenizer: Path | None, ours: Generator, theirs: Generator) -> Codec | None:
    """The user's, a local model's, or a server's; servers read names and texts by it too."""
    from k3dspark.acceptance.codec import FileCodec
    from k3dspark.acceptance.server import Server

    codec: Codec | None = FileCodec(tokenizer) if tokenizer is not None else None
    for side in sorted((ours, theirs), key=lambda s: s.kind != "local"):
        codec = codec if codec is not None else side.codec()
    for side in (ours, theirs):
        if isinstance(side, Server):
            side.tokenizer = codec
    return codec


def _inputs(
    file: Path | None, lengths: str, per_length: int, new_tokens: int, ours: Generator, theirs: Generator,
    codec: Codec | None,
) -> InputSet:  # fmt: skip
    from dataclasses import replace

    from k3dspark.acceptance.inputs import built_in, fitting, parse_lengths, read_file

    if file is not None:
        return read_file(file, new_tokens, codec)
    contexts = [side.context for side in (ours, theirs) if side.context is not None]
    kept, notes = fitting(parse_lengths(lengths), min(contexts, default=None), new_tokens)
    found = built_in(kept, per_length, new_tokens, codec, chat=ours.chats and theirs.chats)
    return replace(found, notes=(*notes, *found.notes))


def _print(result: Acceptance) -> None:
    from rich.console import Console
    from rich.text import Text

    from k3dspark.acceptance import report
    from k3dspark.acceptance.verdict import FINDINGS

    console = Console(highlight=False)
    console.print(Text(f"baseline:  {clean(result.baseline)}\ncandidate: {clean(result.candidate)}"), soft_wrap=True)
    for note in (*result.inputs.notes, *report.source_lines(result)):
        console.print(Text(clean(note), "dim"), soft_wrap=True)
    _table(console, report.TALLY_COLUMNS, [report.tally_row(t) for t in result.tallies])
    _table(console, report.DIVERGENCE_COLUMNS, [report.divergence_row(d) for d in result.divergences])
    for line in report.numeric_lines(result):
        console.print(Text(line, "dim"), soft_wrap=True)
    _table(console, report.TEST_COLUMNS, [report.sampled_row(t) for t in result.tests])
    for name in result.verdict.findings:
        console.print(Text(FINDINGS[name], "yellow"), soft_wrap=True)
    console.print(Text(result.verdict.meaning, "bold green" if result.verdict.accepted else "bold red"), soft_wrap=True)


def _table(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.text import Text

    if rows:
        found = table(*((column, "left" if column in ("inputs", "input", "run", "class", "evidence") else "right")
                        for column in columns))  # fmt: skip
        for row in rows:
            found.add_row(*(Text(clean(cell)) for cell in row))
        console.print(found)
