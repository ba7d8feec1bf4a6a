"""The embedded pair on prompts its training never saw: acceptance, speed-up, and that no token changed.

For every prompt, decoding with the draft and without it take turns round by round on the same engine and kernels;
transformers' `generate` then answers the same prompt with the same weights and dtype (on every n-th prompt, since it
is the slowest). Ratios are formed within a prompt and reported as median and quartiles over prompts.

    python benchmarks/embedded.py [--prompts FILE] [--limit N] [--max-new-tokens 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3dspark.decoding import DecodeStats, Engine, SamplingParams
from k3dspark.decoding.compare import Comparison, compare
from k3dspark.embedded.pair import EMBEDDED_DRAFT, ModelPair, load_pair
from k3dspark.embedded.target import embedded_target_dir

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"


def main() -> None:
    arguments = parse()
    prompts = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = prompts[: arguments.limit]
    pair = load_pair(None, arguments.draft, dtype=arguments.dtype, threads=arguments.threads)
    speculative, plain = Engine(pair.target, pair.draft, draft_candidates=arguments.candidates), Engine(pair.target)
    reference = Reference(pair) if arguments.reference_every else None
    rows: list[dict[str, Any]] = []
    for index, entry in enumerate(prompts):
        ids = pair.chat_ids(entry["prompt"])
        params = SamplingParams(max_new_tokens=arguments.max_new_tokens, stop_token_ids=pair.stop_ids)
        comparison = compare(speculative, plain, ids, params)
        rows.append({"domain": entry.get("domain", "all"), "comparison": comparison})
        if reference is not None and index % arguments.reference_every == 0:
            rows[-1]["reference"] = reference.tokens_per_second(ids, comparison, arguments.max_new_tokens)
        if not arguments.json:
            print_progress(index, len(prompts), entry, comparison)
    report = summarise(rows, pair, arguments.dtype)
    if arguments.json:
        print(json.dumps(report))
    else:
        print_report(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt" and "domain"')
    parser.add_argument("--draft", type=Path, default=EMBEDDED_DRAFT, help="a draft of the embedded target")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=None, help="Markov loop on the N best base logits of a slot")
    parser.add_argument("--reference-every", type=int, default=5, help="transformers on every N-th prompt; 0: never")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="auto", help="of the target's weights: auto, float32, bfloat16 or int8")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Reference:
    """transformers' greedy `generate` on the same weights, in the dtype of the engine."""

    def __init__(self, pair: ModelPair) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(embedded_target_dir(), dtype=pair.dtype).eval()

    def tokens_per_second(self, ids: Sequence[int], comparison: Comparison, limit: int) -> float:
        """Decode tokens over decode time: the time of a generation less that of its first token."""
        self._timed(ids, 2)  # warm-up
        first, _ = self._timed(ids, 1)
        whole, count = self._timed(ids, limit)
        return (count - 1) / (whole - first)

    def _timed(self, ids: Sequence[int], limit: int) -> tuple[float, int]:
        prompt = torch.tensor([list(ids)])
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False
            )
        return time.perf_counter() - started, output.shape[1] - len(ids)


def summarise(rows: list[dict[str, Any]], pair: ModelPair, dtype: str) -> dict[str, Any]:
    groups = {"all": rows} | {
        d: [r for r in rows if r["domain"] == d] for d in dict.fromkeys(r["domain"] for r in rows)
    }
    return {
        "target": pair.name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "groups": {name: figures(group) for name, group in groups.items()},
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    comparisons: list[Comparison] = [r["comparison"] for r in rows]
    pooled = sum((c.speculative.stats for c in comparisons), DecodeStats())
    result: dict[str, Any] = {
        "prompts": len(rows),
        "identical": sum(c.identical for c in comparisons),
        "acceptance_length": pooled.acceptance_length,
        "acceptance_rate": pooled.acceptance_rate,
        "per_slot_acceptance": list(pooled.per_slot_acceptance),
        "plain_tokens_per_second": spread([c.plain.stats.tokens_per_second for c in comparisons]),
        "speculative_tokens_per_second": spread([c.speculative.stats.tokens_per_second for c in comparisons]),
        "speedup": spread([c.speedup for c in comparisons]),
        "draft_ms": 1000 * pooled.draft_seconds / max(pooled.rounds, 1),
        "verify_ms": 1000 * pooled.verify_seconds / max(pooled.rounds, 1),
        "host_ms": 1000 * pooled.host_seconds / max(pooled.rounds, 1),
    }
    measured = [(r["reference"], r["comparison"]) for r in rows if "reference" in r]
    if measured:
        result["transformers_tokens_per_second"] = spread([rate for rate, _ in measured])
        result["plain_over_transformers"] = spread([c.plain.stats.tokens_per_second / rate for rate, c in measured])
        result["speculative_over_transformers"] = spread(
            [c.speculative.stats.tokens_per_second / rate for rate, c in measured]
        )
    return result


def spread(values: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    if len(values) < 2:
        return values * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, statistics.median(values), high]


def print_progress(index: int, count: int, entry: dict[str, str], comparison: Comparison) -> None:
    stats = comparison.speculative.stats
    print(
        f"{index + 1:3}/{count} {entry.get('domain', ''):10} length {stats.acceptance_length:.2f} "
        f"speed-up {comparison.speedup:.2f} {'identical' if comparison.identical else 'DIFFERENT'}  "
        f"{entry['prompt'][:60]}",
        flush=True,
    )


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=120)
    table = Table(
        title=f"{report['target']}, {report['dtype']}, {report['threads']} threads; median [quartiles] over prompts"
    )
    for column in ("", "identical", "acceptance length", "rate", "plain tok/s", "spec. tok/s", "speed-up"):
        table.add_column(column, justify="left" if not column else "right")
    for name, group in report["groups"].items():
        table.add_row(
            name,
            f"{group['identical']} of {group['prompts']}",
            f"{group['acceptance_length']:.2f}",
            f"{group['acceptance_rate']:.1%}",
            shown(group["plain_tokens_per_second"], 1),
            shown(group["speculative_tokens_per_second"], 1),
            shown(group["speedup"], 2),
        )
    console.print(table)
    overall = report["groups"]["all"]
    slots = " ".join(f"{share:.3f}" for share in overall["per_slot_acceptance"])
    console.print(f"per-slot acceptance: {slots}")
    console.print(
        f"a round: draft {overall['draft_ms']:.1f} ms, verify {overall['verify_ms']:.1f} ms, "
        f"host {overall['host_ms']:.2f} ms"
    )
    if "transformers_tokens_per_second" in overall:
        console.print(
            "transformers generate, same weights and dtype: "
            f"{shown(overall['transformers_tokens_per_second'], 1)} tok/s; "
            f"plain / transformers {shown(overall['plain_over_transformers'], 2)}, "
            f"speculative / transformers {shown(overall['speculative_over_transformers'], 2)}"
        )


def shown(values: list[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low}–{high})"


if __name__ == "__main__":
    main()
