"""Many requests at once: plain decoding, fixed draft lengths and the cost-aware schedule at each concurrency.

Every engine answers the same prompts with the same target, as many at once as the concurrency says, a fixed number of
tokens each (no stop token, greedy). Turns are short and the engines take them in another order each time, so that a
noisy machine is noisy to all; a ratio is formed within a turn. Reading the prompts is part of the time.

`--vllm URL` adds a running vLLM (or any OpenAI-compatible server) of the same target without a draft to the same table,
over HTTP, in the same turns; it idles in ours, as we do in its. Start it with as many threads as are used here.

    python benchmarks/throughput.py [--concurrency 1,2,4,8,16,32] [--lengths 1,2,3,5] [--turns 3] [--vllm URL] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from k3dspark.decoding import CostAware, Engine, FixedLength, FullBlock, SamplingParams, Scheduler
from k3dspark.decoding.calibration import read_calibration
from k3dspark.decoding.costs import measure
from k3dspark.embedded.pair import EMBEDDED_DRAFT, ModelPair, load_pair

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"
PLAIN, COST, VLLM = "plain", "cost-aware", "vLLM"
LEAST_REQUESTS = 4  # in a turn, however few run at once
GOAL_BEST = 0.97
GOALS_PLAIN_OVER_VLLM = 0.8
GOALS_COST_OVER_VLLM = {1: 1.2, 2: 1.2, 4: 1.2, 8: 1.0}

Turn = Callable[[Sequence[list[int]], int], float]  # prompts, how many at once -> tokens per second


def main() -> None:
    arguments = parse()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    pair = load_pair(arguments.target, arguments.draft, dtype=arguments.dtype, threads=arguments.threads)
    prompts = [pair.chat_ids(str(json.loads(line)["prompt"])) for line in lines]
    turns = our_turns(pair, arguments)
    if arguments.vllm:
        turns[VLLM] = server_turn(arguments.vllm, arguments.max_new_tokens)
    rates: dict[int, list[dict[str, float]]] = {}
    for concurrency in arguments.concurrency:
        rates[concurrency] = measure_at(concurrency, turns, prompts, arguments)
    report = summarise(rates) | {
        "target": pair.name,
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "turns": arguments.turns,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print_report(report)


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 3, 5], help="fixed lengths; a whole block is added")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt"')
    parser.add_argument("--target", type=Path, default=None, help="default: the embedded one")
    parser.add_argument("--draft", type=Path, default=EMBEDDED_DRAFT)
    parser.add_argument("--repeats", type=int, default=10, help="timings of each shape when costs are profiled")
    parser.add_argument("--vllm", metavar="URL", help="a running server of the same target, such as http://host:8000")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="auto", help="of the target's weights: auto, float32, bfloat16 or int8")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- turns


def our_turns(pair: ModelPair, arguments: argparse.Namespace) -> dict[str, Turn]:
    draft = pair.draft
    assert draft is not None
    costs = measure(pair.target, draft, max(arguments.concurrency), repeats=arguments.repeats)
    calibration = read_calibration(arguments.draft, draft)
    schedulers: dict[str, Callable[[], Scheduler]] = {
        f"fixed {n}": lambda n=n: FixedLength(n)  # type: ignore[misc]
        for n in sorted({*arguments.lengths, draft.block_size})
    }
    schedulers[COST] = lambda: CostAware(costs, calibration=calibration)
    params = SamplingParams(arguments.max_new_tokens)
    turns: dict[str, Turn] = {PLAIN: lambda prompts, n: run(Engine(pair.target, None, FullBlock()), prompts, n, params)}
    for name, scheduler in schedulers.items():
        turns[name] = lambda prompts, n, make=scheduler: run(  # type: ignore[misc]
            Engine(pair.target, draft, make()), prompts, n, params
        )
    return turns


def run(engine: Engine, prompts: Sequence[list[int]], concurrency: int, params: SamplingParams) -> float:
    """Tokens per second of answering all prompts, `concurrency` of them at once."""
    left, tokens, started = list(prompts), 0, perf_counter()
    while left or not engine.idle:
        while left and len(engine.waiting) + len(engine.running) < concurrency:
            engine.submit(left.pop(0), params)
        tokens += sum(len(part.new_ids) for part in engine.step())
    return tokens / (perf_counter() - started)


def server_turn(url: str, max_new_tokens: int) -> Turn:
    """The same over HTTP, token ids in and greedy."""
    model = httpx.get(url + "/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
    asked = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}

    async def answer(prompts: Sequence[list[int]], concurrency: int) -> float:
        left, tokens = list(prompts), 0
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

            async def client_of_one() -> None:
                nonlocal tokens
                while left:
                    reply = await client.post(url + "/v1/completions", json=asked | {"prompt": left.pop(0)})
                    tokens += reply.raise_for_status().json()["usage"]["completion_tokens"]

            started = perf_counter()
            await asyncio.gather(*(client_of_one() for _ in range(concurrency)))
            return tokens / (perf_counter() - started)

    return lambda prompts, concurrency: asyncio.run(answer(prompts, concurrency))


def measure_at(
    concurrency: int, turns: dict[str, Turn], prompts: Sequence[list[int]], arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """Rates by engine, one mapping for each turn; other prompts every turn."""
    endless, names, rates = cycle(prompts), list(turns), []
    for name in names:  # first calls allocate and choose kernels
        turns[name](list(prompts[:concurrency]), concurrency)
    for number in range(arguments.turns):
        asked = list(islice(endless, max(concurrency, LEAST_REQUESTS)))
        order = names[number % len(names) :] + names[: number % len(names)]
        rates.append({name: turns[name](asked, concurrency) for name in order})
        if not arguments.json:
            shown = "  ".join(f"{name} {rates[-1][name]:.1f}" for name in names)
            print(f"{concurrency:3} at once, turn {number + 1}: {shown}", flush=True)
    return rates


# -- report


def summarise(rates: dict[int, list[dict[str, float]]]) -> dict[str, Any]:
    names = list(next(iter(rates.values()))[0])
    fixed = [name for name in names if name.startswith("fixed")]
    table = {n: {name: statistics.median(turn[name] for turn in turns) for name in names} for n, turns in rates.items()}
    rows = []
    for n, turns in rates.items():
        best = max(fixed, key=lambda name: table[n][name])
        rivals = [PLAIN, *fixed]
        row: dict[str, Any] = {
            "concurrency": n,
            "tokens_per_second": table[n],
            "best_fixed": best,
            "cost_over_best_of_the_others": statistics.median(t[COST] / max(t[r] for r in rivals) for t in turns),
            "cost_over_plain": statistics.median(t[COST] / t[PLAIN] for t in turns),
        }
        if VLLM in names:
            row["plain_over_vllm"] = statistics.median(t[PLAIN] / t[VLLM] for t in turns)
            row["cost_over_vllm"] = statistics.median(t[COST] / t[VLLM] for t in turns)
        rows.append(row)
    # A sweep as a whole: the geometric mean, in which every concurrency weighs the same.
    sweep = {
        name: math.exp(statistics.fmean(math.log(table[n][COST] / table[n][name]) for n in table)) for name in fixed
    }
    return {"rows": rows, "cost_over_fixed_in_the_sweep": sweep}


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=140, highlight=False)
    names = list(report["rows"][0]["tokens_per_second"])
    title = "{target}, {dtype}, {threads} threads, {turns} turns: tokens per second (medians)".format(**report)
    table = Table(title=title)
    for column in (
        "at once",
        *names,
        "best fixed",
        "cost-aware / best of the others",
        "/ plain",
        "plain / vLLM",
        "/ vLLM",
    ):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            str(row["concurrency"]),
            *(f"{row['tokens_per_second'][name]:.1f}" for name in names),
            row["best_fixed"].removeprefix("fixed "),
            *(f"{row[key]:.2f}" if key in row else "–" for key in
              ("cost_over_best_of_the_others", "cost_over_plain", "plain_over_vllm", "cost_over_vllm")),
        )  # fmt: skip
    console.print(table)
    rows, sweep = report["rows"], report["cost_over_fixed_in_the_sweep"]
    worst = min(row["cost_over_best_of_the_others"] for row in rows)
    console.print(f"cost-aware over the best of the others, worst: {worst:.3f}; {goal(worst, GOAL_BEST)}")
    named = ", ".join(f"{name} {ratio:.3f}" for name, ratio in sweep.items())
    console.print(f"over the whole sweep, cost-aware over {named}; {goal(min(sweep.values()), 1.0)}")
    if VLLM in names:
        least = min(row["plain_over_vllm"] for row in rows)
        console.print(f"plain over vLLM, worst: {least:.3f}; {goal(least, GOALS_PLAIN_OVER_VLLM)}")
        for row in rows:
            if wanted := GOALS_COST_OVER_VLLM.get(row["concurrency"]):
                console.print(
                    f"cost-aware over vLLM at {row['concurrency']}: {row['cost_over_vllm']:.3f}; "
                    f"{goal(row['cost_over_vllm'], wanted)}"
                )


def goal(value: float, least: float) -> str:
    return f"goal {least:g}: " + ("[green]met[/]" if value >= least else "[red]not met[/]")


if __name__ == "__main__":
    main()
