"""Draft lengths at batch 1: plain decoding, every fixed length, threshold and cost-aware, interleaved in one run.

All engines answer the same prompt with the same target and draft at the same time: whichever has the fewest tokens
moves next, so that a noisy machine is noisy to all. Rates are pooled over prompts; the ratio of the cost-aware
schedule to a fixed length is formed within a prompt and reported as median and quartiles.

The second table is the reliability of survival on whole blocks of the same prompts, before and after the calibration
beside the draft. It is fitted on other prompts (`k3dspark calibrate`); where there is none, half of the prompts here
are fitted on and the other half judged.

    python benchmarks/schedule.py [--limit N] [--setting greedy] [--max-new-tokens 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3dspark.decoding import CostAware, DecodeStats, Engine, FixedLength, SamplingParams, Threshold
from k3dspark.decoding.calibration import Calibration, Scaling, Setting, read_calibration
from k3dspark.decoding.compare import WARM_UP_TOKENS
from k3dspark.decoding.costs import measure
from k3dspark.decoding.scheduler_for import LEAST_SURVIVAL
from k3dspark.embedded.pair import EMBEDDED_DRAFT, ModelPair, load_pair
from k3dspark.model.draft import K3DSparkModel
from k3dspark.training.calibrate import SlotFigures, fit, judge, record, split

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"
PLAIN, THRESHOLD, COST = "plain", f"threshold {LEAST_SURVIVAL:g}", "cost-aware"
GOAL_RATIO, GOAL_ECE = 0.98, 0.03


def main() -> None:
    arguments = parse()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines][: arguments.limit]
    pair = load_pair(None, arguments.draft, threads=arguments.threads)
    assert pair.draft is not None
    setting = Setting.parse(arguments.setting)
    report: dict[str, Any] = {
        "target": pair.name,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "setting": setting.key,
        "prompts": len(prompts),
    }
    calibration = read_calibration(arguments.draft, pair.draft)
    if not arguments.no_reliability:
        report["reliability"] = reliability(pair, pair.draft, prompts, setting, calibration, arguments)
    if not arguments.no_speed:
        report["speed"] = speed(pair, pair.draft, prompts, setting, calibration, arguments)
    if arguments.json:
        print(json.dumps(report))
    else:
        print_report(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt"')
    parser.add_argument("--draft", type=Path, default=EMBEDDED_DRAFT, help="a draft of the embedded target")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--setting", default="greedy", help='such as "temperature=1,top_p=0.95"')
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20, help="timings of each shape when costs are profiled")
    parser.add_argument("--batch", type=int, default=8, help="prompts at once where only reliability is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-speed", action="store_true", help="only reliability")
    parser.add_argument("--no-reliability", action="store_true", help="only speed")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- speed


def speed(
    pair: ModelPair,
    draft: K3DSparkModel,
    prompts: Sequence[str],
    setting: Setting,
    calibration: Calibration | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    costs = measure(pair.target, draft, repeats=arguments.repeats)
    engines = {PLAIN: Engine(pair.target, exact=True)}
    engines |= {
        f"fixed {n}": Engine(pair.target, draft, FixedLength(n), exact=True) for n in range(1, draft.block_size + 1)
    }
    engines[THRESHOLD] = Engine(pair.target, draft, Threshold(LEAST_SURVIVAL, calibration=calibration), exact=True)
    engines[COST] = Engine(pair.target, draft, CostAware(costs, calibration=calibration, alone=True), exact=True)
    rows: list[dict[str, DecodeStats]] = []
    identical = 0
    for index, prompt in enumerate(prompts):
        ids = pair.chat_ids(prompt)

        def params(limit: int, seed: int = arguments.seed + index) -> SamplingParams:
            return setting.params(max_new_tokens=limit, stop_token_ids=pair.stop_ids, seed=seed)

        side_by_side(engines, ids, params(min(WARM_UP_TOKENS, arguments.max_new_tokens)))
        answers, stats = side_by_side(engines, ids, params(arguments.max_new_tokens))
        rows.append(stats)
        identical += len(set(answers)) == 1
        if not arguments.json:
            print(
                f"{index + 1:3}/{len(prompts)} {rate(stats[COST]) / rate(stats[PLAIN]):.2f}  {prompt[:60]}", flush=True
            )
    return summarise(rows, costs.as_json(), identical if setting == Setting() else None)


def side_by_side(
    engines: dict[str, Engine], ids: Sequence[int], params: SamplingParams
) -> tuple[list[tuple[int, ...]], dict[str, DecodeStats]]:
    """Answers and statistics of all engines; the one with the fewest tokens moves next."""
    streams = {name: engine.stream(ids, params) for name, engine in engines.items()}
    running = dict(streams)
    while running:
        name = min(running, key=lambda n: len(running[n].request.new_ids))
        if next(running[name], None) is None:
            del running[name]
    return [s.result.token_ids for s in streams.values()], {n: s.result.stats for n, s in streams.items()}


def rate(stats: DecodeStats) -> float:
    return stats.tokens_per_second


def summarise(rows: list[dict[str, DecodeStats]], costs: dict[str, Any], identical: int | None) -> dict[str, Any]:
    pooled = {name: sum((row[name] for row in rows), DecodeStats()) for name in rows[0]}
    best = max((name for name in pooled if name.startswith("fixed")), key=lambda name: rate(pooled[name]))
    usable = [row for row in rows if all(rate(stats) for stats in row.values())]  # an answer of one token has no rate
    return {
        "costs": costs,
        "identical": identical,  # prompts on which all engines gave the same tokens; None when sampled
        "schedules": {
            name: {
                "tokens_per_second": rate(stats),
                "speedup": spread([rate(row[name]) / rate(row[PLAIN]) for row in usable]),
                "acceptance_length": stats.acceptance_length,
                "acceptance_rate": stats.acceptance_rate,
                "verified_per_round": stats.drafted / max(stats.rounds, 1),
            }
            for name, stats in pooled.items()
        },
        "best_fixed": best,
        "cost_over_best_fixed": rate(pooled[COST]) / rate(pooled[best]),
        "cost_over_best_fixed_by_prompt": spread([rate(row[COST]) / rate(row[best]) for row in usable]),
    }


def spread(values: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    if len(values) < 2:
        return values * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, statistics.median(values), high]


# -- reliability


def reliability(
    pair: ModelPair,
    draft: K3DSparkModel,
    prompts: Sequence[str],
    setting: Setting,
    calibration: Calibration | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    rounds = record(
        pair.target,
        draft,
        [pair.chat_ids(prompt) for prompt in prompts],
        lambda i: setting.params(
            max_new_tokens=arguments.max_new_tokens, stop_token_ids=pair.stop_ids, seed=arguments.seed + i
        ),
        arguments.batch,
    )
    packaged = calibration is not None and calibration.covers(setting)
    if calibration is not None and packaged:
        scaling: Scaling = calibration.scaling(setting.key)
    else:
        fit_on, judge_on = split(prompts)
        scaling, rounds = fit(rounds.of(fit_on)), rounds.of(judge_on)
    return {
        "calibration": "the file beside the draft" if packaged else "half of these prompts",
        "rounds": len(rounds),
        "slots": [slot_row(figures) for figures in judge(rounds, scaling)],
    }


def slot_row(figures: SlotFigures) -> dict[str, float | None]:
    return {
        "survived": figures.survival_before.mean_outcome,
        "ece_before": figures.survival_before.ece,
        "ece_after": figures.survival_after.ece,
        "ece_floor": figures.floor,
        "auroc": figures.survival_after.auroc,
        "brier_before": figures.survival_before.brier,
        "brier_after": figures.survival_after.brier,
    }


# -- printing


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=120, highlight=False)
    title = "{target}, {dtype}, {threads} threads, {setting}, {prompts} prompts".format(**report)
    if "speed" in report:
        print_speed(console, title, report["speed"])
    if "reliability" in report:
        print_reliability(console, title, report["reliability"])


def print_speed(console: Console, title: str, speed: dict[str, Any]) -> None:
    table = Table(title=f"{title}; speed-up: median (quartiles) over prompts")
    for column in ("", "tok/s", "speed-up", "acceptance length", "rate", "verified a round"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in speed["schedules"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']:.1f}",
            shown(row["speedup"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['acceptance_rate']:.1%}",
            f"{row['verified_per_round']:.2f}",
        )
    console.print(table)
    draft_ms, verify_ms = (" ".join(f"{1000 * s:.1f}" for _, s in speed["costs"][k]) for k in ("draft", "verify"))
    console.print(f"profiled: draft {draft_ms} ms; verify, by rows, {verify_ms} ms")
    if speed["identical"] is not None:
        console.print(f"all schedules gave the same tokens on {speed['identical']} prompts")
    ratio = speed["cost_over_best_fixed"]
    console.print(
        f"cost-aware over the best fixed length ({speed['best_fixed']}): {ratio:.3f} pooled, "
        f"{shown(speed['cost_over_best_fixed_by_prompt'])} by prompt; goal {GOAL_RATIO}: {verdict(ratio >= GOAL_RATIO)}"
    )


def print_reliability(console: Console, title: str, found: dict[str, Any]) -> None:
    table = Table(
        title=f"{title}; survival over {found['rounds']:,} whole blocks, calibrated by {found['calibration']}"
    )
    for column in ("slot", "survived", "ECE before", "after", "floor", "AUROC", "Brier before", "after"):
        table.add_column(column, justify="right")
    for slot, row in enumerate(found["slots"], 1):
        table.add_row(str(slot), *("—" if value is None else f"{value:.3f}" for value in row.values()))
    console.print(table)
    worst = max(row["ece_after"] for row in found["slots"])
    console.print(f"largest ECE after calibration: {worst:.3f}; goal {GOAL_ECE}: {verdict(worst <= GOAL_ECE)}")


def verdict(met: bool) -> str:
    return "[green]met[/]" if met else "[red]not met[/]"


def shown(values: list[float]) -> str:
    low, middle, high = (f"{value:.3f}" for value in values)
    return f"{middle} ({low}–{high})"


if __name__ == "__main__":
    main()
