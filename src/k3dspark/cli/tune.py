"""`k3dspark tune`: the draft length for each load, simulated from measured costs and acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import print_json, table

if TYPE_CHECKING:
    from k3dspark.deploy.tuning import Load, Tuning


def tune(
    costs: Annotated[Path, typer.Argument(metavar="COSTS.json", help="Time of a step by requests and length.")],
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="FILE|NUMBERS",
            help="How often each slot is kept: 0.86,0.71,… or a JSON file.",
            show_default="what bench wrote into COSTS.json",
        ),
    ] = "",
    conditional: Annotated[
        bool, typer.Option("--conditional", help="The numbers are rates given the slots before.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Replicas (data parallel ranks).", min=1)] = 1,
    sequences: Annotated[int, typer.Option(help="Requests at once in each.", min=1)] = 16,
    users: Annotated[str, typer.Option(metavar="LIST", help="Loads: users at a time.")] = "",
    rates: Annotated[str, typer.Option(metavar="LIST", help="Loads: requests a second, at random times.")] = "",
    requests: Annotated[
        int, typer.Option(help="Requests to simulate at each load; 40 a user are enough.", min=1)
    ] = 2000,
    output_tokens: Annotated[int, typer.Option(help="Mean length of an answer.", min=1)] = 256,
    equal: Annotated[bool, typer.Option("--equal", help="All answers of that length.")] = False,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=0)] = 0,
    prefill: Annotated[
        float | None,
        typer.Option(help="Seconds that a prompt's token adds.", min=0, show_default="what COSTS.json says, or 0"),
    ] = None,
    longest: Annotated[int, typer.Option(help="Longest length to try; else all slots.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.", min=0)] = 0,
    engine: Annotated[str, typer.Option(help="Whose option to print: vllm, vllm-ascend or sglang.")] = "vllm",
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write it into the launch files of `plan --out DIR`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also over launch files changed by hand.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Simulate no draft, every fixed length, a length by batch size and adaptive verification at each load.

    Exit status: 0 done, 2 the tables cannot be used, or the plan's engine lacks the option.
    """
    from k3dspark.deploy.acceptance_profile import read_profile
    from k3dspark.deploy.engines import engine_named
    from k3dspark.deploy.launch_files import read_launch_directory
    from k3dspark.deploy.simulation import Cluster, Workload
    from k3dspark.deploy.step_costs import read_costs
    from k3dspark.deploy.tuning import engine_option, write_into
    from k3dspark.deploy.tuning import tune as simulate

    plan = None if into is None else read_launch_directory(into)
    name = engine_named(plan.settled.engine.name if plan else engine).name
    if plan is not None:
        replicas, sequences = plan.settled.data_parallel, plan.settled.wish.sequences
    cluster = Cluster(replicas, sequences)
    step_costs = read_costs(costs)
    tuning = simulate(
        step_costs,
        read_profile(acceptance or str(costs), conditional),
        cluster,
        Workload(
            requests,
            output_tokens=output_tokens,
            varied=not equal,
            prompt_tokens=prompt_tokens,
            prefill_seconds_per_token=step_costs.prefill_seconds_per_token if prefill is None else prefill,
        ),
        tuple(int(n) for n in _numbers(users)) if users or rates else _powers(replicas * sequences),
        _numbers(rates),
        longest,
        seed,
    )
    if plan is not None:
        write_into(tuning, plan, force)
    option = engine_option(tuning, name)
    if report is not None:
        from k3dspark.cli.tune_report import tuning_page

        tuning_page(tuning, name, option).write(report)
    if as_json:
        print_json(_as_json(tuning, name, option))
        return
    _print(tuning, name, option, into)


def _numbers(text: str) -> tuple[float, ...]:
    from k3dspark.errors import BadInput

    try:
        numbers = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise BadInput(f"{text!r} is no list of numbers", str(error), "write 1,4,16") from error
    if any(not 0 < number < 1e9 for number in numbers):
        raise BadInput(f"{text!r} holds an impossible load", "loads are positive", "write 1,4,16")
    return numbers


def _powers(most: int) -> tuple[int, ...]:
    """1, 4, 16 … and the number that fills the cluster."""
    return tuple(sorted({min(4**n, most) for n in range(10)}))


def load_name(load: Load) -> str:
    """A load in words, e.g. `16 users`."""
    return f"{load.users} users" if load.users else f"{load.rate:g}/s"


def _print(tuning: Tuning, engine: str, option: dict[str, Any], into: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    names = [result.policy for result in tuning.loads[0].results]
    speeds = table(("tokens/s", "left"), *((load_name(load), "right") for load in tuning.loads))
    for index, name in enumerate(names):
        cells = []
        for load in tuning.loads:
            result = load.results[index]
            mark = "bold green" if result is load.best else ""
            cells.append(f"[{mark}]{result.tokens_per_second:,.1f}[/]" if mark else f"{result.tokens_per_second:,.1f}")
        speeds.add_row(name, *cells)
    console.print(speeds)
    times = table(("load", "right"), ("batch", "right"), ("best", "left"), ("speed-up", "right"),
                  ("ms/token", "right"), ("without", "right"), ("break-even length of 1 … block", "left"))  # fmt: skip
    for load in tuning.loads:
        times.add_row(
            load_name(load),
            str(load.batch),
            load.best.policy,
            f"{load.best.tokens_per_second / load.plain.tokens_per_second:.2f}",
            f"{1000 * float(load.best.per_token.mean()):.1f}",
            f"{1000 * float(load.plain.per_token.mean()):.1f}",
            " ".join(f"{length:.2f}" for _, length in load.break_even),
        )
    console.print()
    console.print(times)
    lengths = " ".join(f"{tuning.profile.length(k):.2f}" for k in range(1, tuning.profile.slots + 1))
    console.print(f"\nacceptance length of 1 … {tuning.profile.slots} draft tokens: {lengths}", soft_wrap=True)
    by_batch = ", ".join(f"{start}–{end}: {length}" for start, end, length in tuning.table)
    console.print(f"length by batch size: {by_batch}; one length for all loads: {tuning.one_length}", soft_wrap=True)
    if all(length == 0 for _, _, length in tuning.table):
        console.print("drafting pays at no load: launch without a draft", style="bold yellow", soft_wrap=True)
    console.print(f"{engine}: {', '.join(f'{key} {value}' for key, value in option.items())}", soft_wrap=True)
    if into is not None:
        console.print(f"written into {into}; next: k3dspark launch {into}", style="dim", soft_wrap=True)


def _as_json(tuning: Tuning, engine: str, option: dict[str, Any]) -> Any:
    return {
        "format": 1,
        "cluster": {"replicas": tuning.cluster.replicas, "sequences": tuning.cluster.sequences},
        "acceptance_length": [tuning.profile.length(k) for k in range(tuning.profile.slots + 1)],
        "loads": [
            {
                "users": load.users or None,
                "rate": load.rate or None,
                "batch": load.batch,
                "best": load.best.policy,
                "break_even_acceptance_length": [length for _, length in load.break_even],
                "policies": [
                    {
                        "policy": result.policy,
                        "tokens_per_second": result.tokens_per_second,
                        "seconds_per_token": float(result.per_token.mean()),
                        "waiting_seconds": float(result.waiting.mean()),
                        "acceptance_length": result.acceptance_length,
                        "mean_draft_tokens": result.mean_length,
                        "mean_batch": result.mean_batch,
                        "requests": result.requests,
                        "tokens": result.tokens,
                        "steps": result.steps,
                    }
                    for result in load.results
                ],
            }
            for load in tuning.loads
        ],
        "length_by_batch": [list(item) for item in tuning.table],
        "one_length": tuning.one_length,
        "engine": {"name": engine, "option": option},
    }
