"""What rounding the embedded target's weights costs: perplexity of a text that nothing was fitted to, by --dtype.

The text is the 200 hand-written prompts of `prompts/evaluation.jsonl`, each by itself and without the chat template;
every token but the first is predicted from those before it.

    python benchmarks/precision.py [--dtypes float32,bfloat16,int8] [--prompts FILE] [--limit N] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from k3dspark.embedded.pair import ModelPair, load_embedded_pair
from k3dspark.target.protocol import RaggedRows

PROMPTS = Path(__file__).parent / "prompts" / "evaluation.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16", "int8"])
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "prompt"')
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    prompts = [str(json.loads(line)["prompt"]) for line in lines]
    report = {}
    agreed: dict[str, torch.Tensor] = {}
    for dtype in arguments.dtypes:
        loss, choices = read(load_embedded_pair(dtype=dtype, with_draft=False), prompts)
        agreed[dtype] = choices
        same = (choices == agreed[arguments.dtypes[0]]).double().mean().item()
        report[dtype] = {"perplexity": math.exp(loss), "tokens": len(choices), "same_choice": same}
    if arguments.json:
        print(json.dumps(report))
        return
    table = Table(title=f"{len(prompts)} prompts; choices against {arguments.dtypes[0]}")
    for column in ("dtype", "tokens", "perplexity", "same best token"):
        table.add_column(column, justify="right")
    for dtype, row in report.items():
        table.add_row(dtype, f"{row['tokens']:,}", f"{row['perplexity']:.3f}", f"{100 * row['same_choice']:.2f} %")
    Console(width=100).print(table)


def read(pair: ModelPair, prompts: list[str]) -> tuple[float, torch.Tensor]:
    """Mean negative log-likelihood of the tokens of all prompts, and the best token before each of them."""
    losses, choices = [], []
    for prompt in prompts:
        ids = torch.tensor(pair.raw_ids(prompt))
        sequence = pair.target.open(len(ids))
        logits = pair.target.forward(RaggedRows((sequence,), (len(ids) - 1,), ids[:-1])).logits
        pair.target.commit(sequence, 0)
        pair.target.close(sequence)
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").double())
        choices.append(logits.argmax(-1))
    return float(torch.cat(losses).mean()), torch.cat(choices)


if __name__ == "__main__":
    main()
