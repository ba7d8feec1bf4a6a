"""Our CPU kernels against PyTorch's: the embedded pair decoding with and without them, round by round in turns.

Ratios of the time per token are formed within a prompt and reported as median and quartiles over prompts. The two runs
may part at near-ties, where sums in another order fall the other way; the column says on how many prompts they agree.

    python benchmarks/cpu_kernels.py [--prompts FILE] [--every 4] [--max-new-tokens 64] [--dtype float32] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.decoding.compare import compare
from k3dspark.embedded.pair import load_embedded_pair
from k3dspark.model import native

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt"')
    parser.add_argument("--every", type=int, default=4, help="take every n-th prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not native.available():
        raise SystemExit(f"there are no kernels here: {native.reason()}")
    ours = load_embedded_pair(dtype=arguments.dtype)
    with patch.object(native, "available", lambda: False):
        theirs = load_embedded_pair(dtype=arguments.dtype)
    engines = {
        "plain": (Engine(ours.target), Engine(theirs.target)),
        "speculative": (Engine(ours.target, ours.draft), Engine(theirs.target, theirs.draft)),
    }
    prompts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    same = dict.fromkeys(engines, 0)
    for prompt in prompts[:: arguments.every]:
        params = SamplingParams(arguments.max_new_tokens, stop_token_ids=ours.stop_ids)
        for name, (first, second) in engines.items():
            both = compare(first, second, ours.chat_ids(prompt), params)
            ratios[name].append(both.speedup)
            same[name] += both.identical
    report = {
        name: {"ratio": quartiles(values), "prompts": len(values), "same_tokens": same[name]}
        for name, values in ratios.items()
    }
    if arguments.json:
        print(json.dumps(report | {"dtype": arguments.dtype, "threads": torch.get_num_threads()}))
        return
    table = Table(title=f"tokens per second, ours over PyTorch's; {arguments.dtype}, {torch.get_num_threads()} threads")
    for column in ("decoding", "median (quartiles)", "same tokens"):
        table.add_column(column)
    for name, row in report.items():
        low, middle, high = row["ratio"]
        table.add_row(name, f"{middle:.2f} ({low:.2f}–{high:.2f})", f"{row['same_tokens']} of {row['prompts']}")
    Console(width=100).print(table)


def quartiles(values: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, statistics.median(values), high]


if __name__ == "__main__":
    main()
