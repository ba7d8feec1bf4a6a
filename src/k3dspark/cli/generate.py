"""`k3dspark generate`: one prompt, answered by a target with a draft at its side."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3dspark.cli import options, prompts, sampling
from k3dspark.cli.output import print_json, table
from k3dspark.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    from k3dspark.decoding import Result, SamplingParams, Scheduler
    from k3dspark.decoding.compare import Comparison
    from k3dspark.decoding.scheduler_for import Schedule
    from k3dspark.embedded.pair import ModelPair

# Line breaks and tabs are text; so are the joiners and spaces of other scripts, which `output.clean` would escape.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_SAMPLING = "Sampling"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.")] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A UTF-8 file with the prompt; '-' is standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    target: options.Target = None,
    draft: options.Draft = None,
    no_draft: options.NoDraft = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to answer.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Also end after this text; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Smallest set of tokens with this mass.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the best k tokens; 0: all.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[
        float, typer.Option(help="Only tokens at least this likely, relative to the best.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Off at 0.", rich_help_panel=_SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Off at 0.", rich_help_panel=_SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Off at 1.", rich_help_panel=_SAMPLING)] = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID:BIAS", help="Add to a token's logit; may be repeated.", rich_help_panel=_SAMPLING),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same tokens.", show_default="a new one", rich_help_panel=_SAMPLING)
    ] = None,
    verify: Annotated[
        Literal["greedy", "token", "block"] | None,
        typer.Option(
            help="How draft tokens are verified.", show_default="greedy or block", rich_help_panel=options.SPECULATION
        ),
    ] = None,
    schedule: options.ScheduleName = None,
    draft_length: options.DraftLength = None,
    threshold: options.Threshold = None,
    online_calibration: options.OnlineCalibration = False,
    costs: options.Costs = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Nothing but prompt, options and seed decides a token.", rich_help_panel=options.SPECULATION
        ),
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode without the draft, interleaved, and compare the two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: log-probabilities, and those of the N best tokens.")
    ] = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Answer a prompt: the target's own tokens, sooner.

    The text goes to standard output as it is decoded, the figures to standard error. With --compare a table follows.
    Greedy decodings must then be identical, and the exit status is 1 when they are not; sampled ones are draws from
    the same distribution, and only their speed is compared.
    """
    text = prompts.read(prompt, prompt_option, prompt_file)
    if compare and no_draft:
        raise BadInput("--compare with --no-draft", "there is nothing to compare plain decoding with", "leave one out")
    if raw and system is not None:
        raise BadInput("--system with --raw", "a system message is part of the chat template", "leave one out")
    options.require_draft(target, draft, no_draft)
    if logprobs is not None and not as_json:
        raise BadInput("--logprobs without --json", "log-probabilities are printed as JSON only", "add --json")
    sampling.check_costs(costs, schedule)
    options.refuse_without_draft(no_draft, verify=verify, schedule=schedule, draft_length=draft_length)

    from k3dspark.decoding import Engine, SamplingParams
    from k3dspark.decoding.compare import compare as decode_both
    from k3dspark.decoding.params import drawn_seed

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=sampling.logit_biases(logit_bias or ()),
        # Drawn here when none is given, so that the JSON can say which and the run can be repeated.
        seed=drawn_seed() if seed is None else seed,
        logprobs=logprobs,
    )
    params = replace(params, verifier=sampling.verifier(verify, params))
    sampling.check_truncation(params)
    plan = sampling.schedule(schedule, draft_length, threshold, online_calibration)
    pair = options.load(target, draft, no_draft, dtype, threads)
    params = replace(params, stop_token_ids=pair.stop_ids)
    prompt_ids = pair.raw_ids(text) if raw else pair.chat_ids(text, system)
    scheduler, calibrated = _scheduler(plan, pair, draft, params, costs, exact)
    engine = Engine(pair.target, pair.draft, scheduler, exact=exact, decode=pair.text)
    printer = _Printer(pair, silent=as_json)
    comparison = None
    if compare:
        plain = Engine(pair.target, exact=exact, decode=pair.text)
        comparison = decode_both(engine, plain, prompt_ids, params, printer.tokens)
        result = comparison.speculative
    else:
        stream = engine.stream(prompt_ids, params)
        for tokens in stream:
            printer.tokens(tokens)
        result = stream.result
    printer.finish()
    if as_json:
        how = {
            "seed": None if params.greedy else params.seed,
            "verify": None if no_draft else "greedy" if params.greedy else params.verifier,
            "schedule": None if no_draft else plan.kind,
            "calibrated": calibrated,
            "exact": exact,
        }
        print_json(_as_json(pair, result, comparison, params) | how, indent=None)
    elif comparison is not None:
        _print_table(pair, comparison, params)
    else:
        print(_summary(result), file=sys.stderr)
    if comparison is not None and params.greedy and comparison.first_difference is not None:
        raise CheckFailed(
            f"the two decodings differ from new token {comparison.first_difference} on",
            "speculative decoding must give exactly the target's own tokens",
            "repeat it with --dtype float32; if they still differ, please report it with the prompt and the model",
        )


def _scheduler(
    plan: Schedule, pair: ModelPair, draft: Path | None, params: SamplingParams, costs: Path | None, exact: bool
) -> tuple[Scheduler | None, bool | None]:
    """The scheduler, and whether confidence is calibrated for this sampling (None: it is not read)."""
    from k3dspark.decoding.calibration import Setting
    from k3dspark.decoding.scheduler_for import scheduler_for

    if pair.draft is None:
        return None, None
    if not plan.reads_confidence:
        return scheduler_for(plan, pair.target, pair.draft), None
    calibration = sampling.calibration(draft, pair.draft)
    table_of_costs = sampling.step_costs(costs, pair) if costs is not None else None
    scheduler = scheduler_for(plan, pair.target, pair.draft, calibration=calibration, costs=table_of_costs, exact=exact)
    return scheduler, calibration is not None and calibration.covers(Setting.of(params))


class _Printer:
    """Writes the answer to standard output while it grows."""

    def __init__(self, pair: ModelPair, silent: bool) -> None:
        from k3dspark.decoding.text import TextStream

        self._stream = TextStream(pair.text)
        self._silent = silent
        self._on_terminal = sys.stdout.isatty()

    def tokens(self, token_ids: Sequence[int]) -> None:
        if not self._silent:
            self._write(self._stream.push(token_ids))

    def finish(self) -> None:
        if not self._silent:
            self._write(self._stream.finish() + "\n")

    def _write(self, piece: str) -> None:
        sys.stdout.write(_visible(piece) if self._on_terminal else piece)
        sys.stdout.flush()


def _visible(text: str) -> str:
    """Control characters as \\x1b and the like: a model must not be able to drive the user's terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _as_json(
    pair: ModelPair, result: Result, comparison: Comparison | None, params: SamplingParams
) -> dict[str, object]:
    stats = result.stats
    return {
        "text": pair.text(result.token_ids),
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.value,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "per_slot_acceptance": list(stats.per_slot_acceptance),
        "tokens_per_second": stats.tokens_per_second,
        "plain": comparison
        and {
            "token_ids": list(comparison.plain.token_ids),
            "tokens_per_second": comparison.plain.stats.tokens_per_second,
        },
        "speedup": comparison and comparison.speedup,
        # Sampled tokens are not expected to be equal, so that they differ says nothing.
        "identical": comparison and comparison.identical if params.greedy else None,
        "logprobs": None
        if params.logprobs is None
        else [{"logprob": entry.logprob, "best": [list(pair) for pair in entry.best]} for entry in result.logprobs],
    }


def _summary(result: Result) -> str:
    stats = result.stats
    words = f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s"
    if stats.drafted:
        words += (
            f", acceptance length {stats.acceptance_length:.2f}"
            f" ({stats.rounds} rounds, {stats.acceptance_rate:.1%} of drafted tokens accepted)"
        )
    return words


def _print_table(pair: ModelPair, comparison: Comparison, params: SamplingParams) -> None:
    import torch
    from rich.console import Console
    from rich.markup import escape

    threads = torch.get_num_threads()
    title = f"{pair.name}, {str(pair.dtype).removeprefix('torch.')}, {threads} CPU thread{'s' * (threads != 1)}"
    plain, ours = comparison.plain.stats, comparison.speculative.stats
    rows = table(("", "left"), ("plain", "right"), ("speculative", "right"))
    rows.add_row("new tokens", str(plain.new_tokens), str(ours.new_tokens))
    rows.add_row("target passes", str(plain.rounds), str(ours.rounds))
    rows.add_row("tokens/s", f"{plain.tokens_per_second:.1f}", f"{ours.tokens_per_second:.1f}")
    rows.add_row("speed-up", "1.00", f"{comparison.speedup:.2f}")
    rows.add_row("acceptance length", "1.00", f"{ours.acceptance_length:.2f}")
    rows.add_row("acceptance rate", "", f"{ours.acceptance_rate:.1%}")
    for slot, share in enumerate(ours.per_slot_acceptance, 1):
        rows.add_row(f"accepted at slot {slot}", "", f"{share:.1%}")
    console = Console(highlight=False)
    console.print(f"\n[bold]{escape(title)}[/]", soft_wrap=True)
    console.print(rows)
    if not params.greedy:
        console.print("sampled: draws from one distribution, whose tokens need not be equal")
    elif comparison.identical:
        console.print("identical: [bold green]yes[/]")
    else:
        console.print("identical: [bold red]no[/]")
