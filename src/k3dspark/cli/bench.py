"""`k3dspark bench`: load on any OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from k3dspark.cli import options
from k3dspark.cli.output import print_json, table
from k3dspark.errors import BadInput, CheckFailed

PROMPTS = (
    "Explain why the sky is blue to a ten-year-old.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List five ways to save water at home, with one sentence each.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise how a bill becomes a law in three paragraphs.",
    "Give me a recipe for vegetable soup.",
    "Describe the water cycle.",
)


def bench(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model's id.", show_default="the first one the server lists")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key.", show_default="K3DSPARK_API_KEY, then OPENAI_API_KEY")
    ] = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", metavar="N[,N…]", help="Requests at once; several for a sweep.")
    ] = "1",
    rate: Annotated[
        str | None,
        typer.Option(metavar="R[,R…]", help="Open loop: requests per second, arriving at random; several for a sweep."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests of each run.")] = 32,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before each run that do not count.")] = 2,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", help="Prompts: one a line, or JSON lines with `prompt`.", show_default="8 built in"
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, where the server can.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of sampling and of arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without anything from the server.")] = 600.0,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also add the time of a step to this cost table of `k3dspark tune`."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens", min=0, max=64, help="With --costs: the server's.", show_default="from its metrics"
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure a server under load: tokens per second, time to first token, time between tokens, acceptance.

    The exit status is 1 when any request failed.
    """
    if endpoint not in ("chat", "completions"):
        raise BadInput(f"--endpoint {endpoint}", "known endpoints are chat and completions", "pass one of them")
    loads = _numbers("--concurrency", concurrency, int)
    rates = _numbers("--rate", rate, float) if rate is not None else []
    prompts = read_prompts(prompt_file) if prompt_file is not None else PROMPTS
    if costs is not None and rates:
        raise BadInput("--costs with --rate", "a step is timed at a fixed number of requests", "pass --concurrency")

    from k3dspark.serving import load_report
    from k3dspark.serving.load import Exchange, LoadSettings, find_model, run_load

    api_key = options.api_key(api_key)
    settings = LoadSettings(
        url=url,
        prompts=tuple(prompts),
        model=model or find_model(url, api_key),
        api_key=api_key,
        chat=endpoint == "chat",
        requests=requests,
        warm_up=warm_up,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        timeout_seconds=timeout,
    )
    plans = [replace(settings, rate=r) for r in rates] or [replace(settings, concurrency=int(c)) for c in loads]
    results, steps = [], []
    for plan in plans:
        done = 0

        def count(_: Exchange) -> None:
            nonlocal done
            done += 1
            if sys.stderr.isatty():
                print(f"\r{done} of {requests} requests", end="", file=sys.stderr, flush=True)

        if costs is None:
            exchanges, seconds = run_load(plan, count)
        else:
            from k3dspark.cli.bench_costs import timed_run

            exchanges, seconds, step = timed_run(plan, draft_tokens, count)
            steps.append(step)
        results.append(load_report.summarise(plan, exchanges, seconds))
        end = "\r" if sys.stderr.isatty() else ""
        print(f"{end}load {load_report.load_label(results[-1])}: {results[-1].tokens_per_second:.1f} tokens/s",
              file=sys.stderr)  # fmt: skip
    if costs is not None:
        from k3dspark.serving.step_times import add_to_table

        add_to_table(costs, steps, f"k3dspark bench, {settings.model}, answers of {max_tokens} tokens")
    if report is not None:
        load_report.write_page(report, plans[0], results)
    if as_json:
        print_json(load_report.as_json(plans[0], results))
    else:
        from rich.console import Console

        rows = table(*((heading, "right") for heading in load_report.COLUMNS))
        for result in results:
            rows.add_row(*load_report.table_row(result))
        Console(highlight=False).print(rows)
    failed = sum(result.failed for result in results)
    if failed:
        first = next(result.first_error for result in results if result.failed)
        raise CheckFailed(f"{failed} requests failed", str(first), "read the server's log; lower the load")


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise BadInput(f"{option} {text}", str(error), f"for example {option} 1,2,4,8") from error
    if any(not number > 0 for number in numbers):
        raise BadInput(f"{option} {text}", "a load is above 0", f"for example {option} 1,2,4,8")
    return list(numbers)


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; a line that is a JSON object has it under `prompt`, or under `question` or `text`.

    Raises `BadInput` naming the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}", str(error), "pass a UTF-8 file with one prompt a line") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("{"):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise BadInput(f"{path}, line {number}", f"not JSON: {error}", "correct the line") from error
            names = ("prompt", "question", "text")
            found = next((entry[name] for name in names if isinstance(entry.get(name), str)), None)
            if found is None:
                raise BadInput(f"{path}, line {number}", "no `prompt` in it", 'write {"prompt": "…"}')
            prompts.append(found)
        elif line.strip():
            prompts.append(line)
    if not prompts:
        raise BadInput(f"{path} has no prompts", "there is nothing to ask", "write one prompt a line")
    return prompts
