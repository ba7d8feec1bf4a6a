"""`k3dspark generate`: one prompt, answered by a target with a draft at its side."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3dspark.cli import prompts
from k3dspark.cli.output import print_json, table
from k3dspark.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    from k3dspark.decoding import Result
    from k3dspark.decoding.compare import Comparison
    from k3dspark.embedded.pair import ModelPair

# Line breaks and tabs are text; so are the joiners and spaces of other scripts, which `output.clean` would escape.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")



def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.")] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A UTF-8 file with the prompt; '-' is standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The verified model.", show_default="the embedded one")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Its draft.", show_default="the embedded one")
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode plainly.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to answer.")] = 256,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode without the draft, interleaved, and compare the two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Format of the weights; auto takes what is fastest here."),
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads.", show_default="as many as PyTorch chooses")
    ] = None,
) -> None:
    """Answer a prompt: the target's own tokens, sooner.

    The text goes to standard output as it is decoded, the figures to standard error. With --compare a table follows,
    and the exit status is 1 when the two decodings differ.
    """
    text = prompts.read(prompt, prompt_option, prompt_file)
    if compare and no_draft:
        raise BadInput("--compare with --no-draft", "there is nothing to compare plain decoding with", "leave one out")
    if raw and system is not None:
        raise BadInput("--system with --raw", "a system message is part of the chat template", "leave one out")
    if target is not None and draft is None and not no_draft:
        raise BadInput(
            f"no draft for {target}",
            "the embedded draft fits the embedded target only",
            "pass --draft DIR, or --no-draft to decode plainly",
        )

    from k3dspark.decoding import Engine, SamplingParams
    from k3dspark.decoding.compare import compare as decode_both
    from k3dspark.embedded.pair import load_embedded_pair, load_pair

    if target is None and draft is None:
        pair = load_embedded_pair(dtype=dtype, threads=threads, with_draft=not no_draft)
    else:
        pair = load_pair(target, None if no_draft else draft, dtype=dtype, threads=threads)
    prompt_ids = pair.raw_ids(text) if raw else pair.chat_ids(text, system)
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=pair.stop_ids)
    engine = Engine(pair.target, pair.draft)
    printer = _Printer(pair, silent=as_json)
    comparison = None
    if compare:
        comparison = decode_both(engine, Engine(pair.target), prompt_ids, params, printer.tokens)
        result = comparison.speculative
    else:
        stream = engine.stream(prompt_ids, params)
        for tokens in stream:
            printer.tokens(tokens)
        result = stream.result
    printer.finish()
    if as_json:
        print_json(_as_json(pair, result, comparison), indent=None)
    elif comparison is not None:
        _print_table(pair, comparison)
    else:
        print(_summary(result), file=sys.stderr)
    if comparison is not None and comparison.first_difference is not None:
        raise CheckFailed(
            f"the two decodings differ from new token {comparison.first_difference} on",
            "speculative decoding must give exactly the target's own tokens",
            "repeat it with --dtype float32; if they still differ, please report it with the prompt and the model",
        )


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


def _as_json(pair: ModelPair, result: Result, comparison: Comparison | None) -> dict[str, object]:
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
        "identical": comparison and comparison.identical,
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


def _print_table(pair: ModelPair, comparison: Comparison) -> None:
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
    if comparison.identical:
        console.print("identical: [bold green]yes[/]")
    else:
        console.print("identical: [bold red]no[/]")
