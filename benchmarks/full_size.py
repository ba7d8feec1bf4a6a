"""The draft of Kimi K3 at its full size on this machine: loading, one block at growing contexts, where the time goes.

Weights are random (`k3dspark synth --out DIR`, 9,473,443,738 bytes): no figure here depends on their values. Every time
stands beside the bytes that had to move and the sums that had to be formed, as shares of the bandwidth and of the fp32
rate measured next to it, so the ratios survive another machine. The larger share names the limit.

    python benchmarks/full_size.py DIR [--contexts 0,32768,131072,1048576] [--threads N] [--cpu-time] [--json]

Needs the checkpoint's bytes in memory, 1.5 GB more, and 5,760 bytes for each token of context. Where the longest
context does not fit beside the weights, attention is measured without them, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3dspark.checkpoint.files import weight_files
from k3dspark.model import mla
from k3dspark.model.allocation import LargestAllocation
from k3dspark.model.cache import LatentCache
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft

Clock = Callable[[], float]
GB = 1e9
SPARE_BYTES = 1_500_000_000
ALLOCATION_LIMIT = 256 << 20
WORKSPACE_BYTES = 700_000_000  # left free beside a cache
PROMPT_CHUNK = 256  # rows of a prompt turned into context rows at once, the engine's default


def main() -> None:
    arguments = parse()
    torch.set_grad_enabled(False)
    if arguments.threads or arguments.cpu_time:
        torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    torch.manual_seed(0)
    files = weight_files(arguments.checkpoint)
    report: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "checkpoint_bytes": sum(path.stat().st_size for path in files),
        "contexts": [],
    }
    machine = Machine(time.process_time if arguments.cpu_time else time.perf_counter)
    draft, report["load"] = measure_load(arguments.checkpoint, files)
    say(arguments, f"loaded: {report['load']}")
    started = time.perf_counter()
    draft.pack()
    report["pack_seconds"] = time.perf_counter() - started
    report["peak_bytes_after_pack"] = status("VmHWM")
    report["prompt_rows_per_second"] = prompt_rows_per_second(draft, machine.clock)
    say(arguments, f"laid out in {report['pack_seconds']:.1f} s")
    for context in arguments.contexts:
        row = measure_context(draft, context, arguments.repeats, machine)
        report["contexts"].append(row)
        say(arguments, f"context {context:,}: {row}")
    report["fit"] = linear_fit(report["contexts"])
    print(json.dumps(report)) if arguments.json else print_report(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="what `k3dspark synth --out DIR` wrote")
    parser.add_argument(
        "--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[0, 32768, 131072, 1048576]
    )
    parser.add_argument("--repeats", type=int, default=3, help="blocks at contexts below 100,000; above, one")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of this process's CPU, for a busy machine; implies one thread"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def say(arguments: argparse.Namespace, line: str) -> None:
    if not arguments.json:
        print(line, flush=True)


# -- loading -----------------------------------------------------------------------------------------------------------


def measure_load(directory: Path, files: list[Path]) -> tuple[K3DSparkModel, dict[str, float]]:
    """The draft, and the time of mapping it and of reading every byte, against plain reads of the same files."""
    K3DSparkConfig.from_file(directory)  # the first use of the class loads much of transformers
    read_seconds = min(read_all(files) for _ in range(2))
    started = time.perf_counter()
    draft = load_draft(directory, mapped=True)
    map_seconds = time.perf_counter() - started
    tensors = [*draft.state_dict().values(), draft.lm_head]
    for tensor in tensors:
        assert tensor is not None
        for part in tensor.view(-1).split(1 << 24):
            part.view(torch.int16).max()
    load_seconds = time.perf_counter() - started
    figures = {
        "read_seconds": read_seconds,
        "map_seconds": map_seconds,
        "map_and_touch_seconds": load_seconds,
        "ratio": load_seconds / read_seconds,
        "peak_bytes": status("VmHWM"),
    }
    for tensor in tensors:
        for file in draft.files:
            assert tensor is not None
            file.give_back(tensor)
    return draft, figures


def read_all(files: list[Path]) -> float:
    """Seconds to read every byte once into one small buffer."""
    buffer = bytearray(8 << 20)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as the peak resident set VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")


def prompt_rows_per_second(draft: K3DSparkModel, clock: Clock) -> float:
    taps = torch.randn(PROMPT_CHUNK, draft.config.context_width).to(draft.dtype)
    started = clock()
    draft.context_rows(taps, torch.arange(PROMPT_CHUNK))
    return PROMPT_CHUNK / (clock() - started)


class Machine:
    """What this process gets of the machine now, with all its threads."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._words = torch.zeros(1 << 26, dtype=torch.int64)
        self._square = torch.randn(1024, 1024)

    def bandwidth(self) -> float:
        """Bytes read per second: a sum over 512 MB."""
        return self._words.nbytes / self._best(self._words.sum)

    def flops(self) -> float:
        """Multiplications and additions per second: a product of fp32 matrices that fit into the cache."""
        return 2 * 1024**3 / self._best(lambda: self._square @ self._square)

    def _best(self, call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(3):
            started = self.clock()
            call()
            seconds.append(self.clock() - started)
        return min(seconds)


# -- blocks ------------------------------------------------------------------------------------------------------------


class Parts:
    """Seconds spent in the parts of a block, by wrapping the calls."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += self.clock() - started

        return wrapper

    @contextmanager
    def over(self, draft: K3DSparkModel) -> Iterator[Parts]:
        calls: list[tuple[Any, str, str]] = [
            (mla, "attend_latent", "attention"),
            (draft, "block_hidden", "hidden"),
            (draft, "base_logits", "lm_head"),
            (draft, "confidence", "confidence"),
            (draft.markov_head, "bias", "Markov"),
        ]
        originals = [getattr(owner, name) for owner, name, _ in calls]
        for (owner, name, part), original in zip(calls, originals, strict=True):
            setattr(owner, name, self.timed(part, original))
        try:
            yield self
        finally:
            for (owner, name, _), original in zip(calls, originals, strict=True):
                setattr(owner, name, original)


def measure_context(draft: K3DSparkModel, context: int, repeats: int, machine: Machine) -> dict[str, Any]:
    """One draft block after `context` rows: medians of the parts, bytes that must move, and the ratio of both."""
    needed = context * draft.new_cache().bytes_per_token + WORKSPACE_BYTES
    if needed > available_bytes():
        free_all_but_attention(draft)
    if needed > available_bytes():
        return {"context": context, "skipped": f"needs {needed:,} bytes, {available_bytes():,} are available"}
    cache = filled_cache(draft, context)
    whole = draft.lm_head is not None
    runs, speeds, rates, largest = [], [], [], LargestAllocation()
    for _ in range(repeats if context < 100_000 else 1):
        speeds.append(machine.bandwidth())
        rates.append(machine.flops())
        parts = Parts(machine.clock)
        started = machine.clock()
        with parts.over(draft), largest:
            if whole:
                draft.propose([cache], torch.tensor([1]), torch.tensor([context]))
            else:
                attention_only(draft, cache, context)
        seconds = dict(parts.seconds)
        seconds["block"] = machine.clock() - started
        if whole:
            seconds["projections"] = seconds.pop("hidden") - seconds["attention"]
        else:
            seconds = {"attention": seconds["attention"]}
        runs.append(seconds)
        speeds.append(machine.bandwidth())
        rates.append(machine.flops())
    speed, rate = max(speeds), max(rates)
    seconds = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    moved, sums = bytes_moved(draft, context), operations(draft, context)
    return {
        "context": context,
        "weights_in_memory": whole,
        "seconds": seconds,
        "bytes": {name: moved[name] for name in seconds},
        "bandwidth": speed,
        "share_of_bandwidth": {name: moved[name] / seconds[name] / speed for name in seconds if seconds[name]},
        "flops": rate,
        "share_of_flops": {name: sums[name] / seconds[name] / rate for name in seconds if seconds[name]},
        "largest_allocation": largest.bytes,
        "cache_bytes": cache.length * cache.bytes_per_token,
        "cache_allocated_bytes": cache.allocated_bytes,
        "peak_bytes": status("VmHWM"),
    }


def filled_cache(draft: K3DSparkModel, context: int) -> LatentCache:
    """A cache of `context` rows like those of a normalised latent; their values do not matter here."""
    cache = draft.new_cache()
    pool = torch.randn(cache.layers, cache.block_tokens, cache.row_width).to(draft.dtype)
    while cache.length < context:
        cache.append(pool[:, : context - cache.length])
    return cache


def free_all_but_attention(draft: K3DSparkModel) -> None:
    draft.lm_head = draft._packed_head = None
    for layer in draft.stack:
        layer.mlp._gate_up = layer.mlp.down_proj._packed = None


def attention_only(draft: K3DSparkModel, cache: LatentCache, context: int) -> None:
    hidden = torch.randn(1, draft.block_size, draft.config.hidden_size).to(draft.dtype)
    angles = draft._angles(draft._block_positions(torch.tensor([context])))
    for index, layer in enumerate(draft.stack):
        layer.self_attn.absorbed(layer.input_layernorm(hidden), angles, [cache.chunks(index)], None)


def bytes_moved(draft: K3DSparkModel, context: int) -> dict[str, int]:
    """Bytes of the checkpoint and of the cache that one block cannot do without."""
    config = draft.config
    moved = {
        "projections": sum(p.nbytes for layer in draft.stack for p in layer.parameters()),
        "attention": context * len(draft.stack) * config.row_width * draft.dtype.itemsize,
        "lm_head": config.draft_vocab_size * config.hidden_size * draft.dtype.itemsize,
        "Markov": draft.block_size * draft.markov_head.markov_w2.weight.nbytes,
        "confidence": sum(p.nbytes for p in draft.confidence_head.parameters()) if draft.confidence_head else 0,
    }
    return moved | {"block": sum(moved.values())}


def operations(draft: K3DSparkModel, context: int) -> dict[str, int]:
    """Multiplications and additions of one block."""
    config, slots = draft.config, 2 * draft.block_size
    attended = (config.row_width + config.kv_lora_rank) * config.num_attention_heads * len(draft.stack)
    sums = {
        "projections": slots * sum(p.numel() for layer in draft.stack for p in layer.parameters()),
        "attention": slots * attended * (context + draft.block_size),
        "lm_head": slots * config.draft_vocab_size * config.hidden_size,
        "Markov": slots * config.draft_vocab_size * config.markov_rank,
        "confidence": slots * config.hidden_size,
    }
    return sums | {"block": sum(sums.values())}


def linear_fit(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Least squares of attention's seconds over the context: seconds = a + b · context."""
    points = [(row["context"], row["seconds"]["attention"]) for row in rows if "seconds" in row]
    if len(points) < 3:
        return None
    contexts, seconds = (list(values) for values in zip(*points, strict=True))
    slope, intercept = statistics.linear_regression(contexts, seconds)
    r = statistics.correlation(contexts, seconds)
    worst = max(abs(intercept + slope * c - s) / s for c, s in points if c)
    return {"a_seconds": intercept, "b_seconds_per_token": slope, "r_squared": r * r, "worst_relative_residual": worst}


# -- printing ----------------------------------------------------------------------------------------------------------


def print_report(report: dict[str, Any]) -> None:
    console = Console(highlight=False, width=120)
    load, size = report["load"], report["checkpoint_bytes"]
    lines = [
        f"{size:,} bytes, {report['threads']} thread(s)",
        f"mapped in {load['map_seconds']:.2f} s; mapped and every byte touched {load['map_and_touch_seconds']:.2f} s = "
        f"{load['ratio']:.2f} × reading the same bytes, {load['read_seconds']:.2f} s",
        f"laid out in {report['pack_seconds']:.1f} s; peak resident {load['peak_bytes'] / GB:.2f} GB after "
        f"loading, {report['peak_bytes_after_pack'] / GB:.2f} GB after laying out; the bound is "
        f"{(size + SPARE_BYTES) / GB:.2f} GB",
        f"context rows of a prompt: {report['prompt_rows_per_second']:.1f} per second in chunks of {PROMPT_CHUNK}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    names = ["projections", "attention", "lm_head", "Markov", "confidence", "block"]
    table = Table("context", "", *names, "cache", "largest allocation")
    for row in report["contexts"]:
        if "skipped" in row:
            table.add_row(f"{row['context']:,}", "skipped", row["skipped"])
            continue
        cells = [[f"{row[key][n]:.3g}" if n in row[key] else "–" for n in names] for key in ("seconds",)]
        table.add_row(
            f"{row['context']:,}",
            "seconds",
            *cells[0],
            f"{row['cache_allocated_bytes']:,} B",
            f"{row['largest_allocation'] / (1 << 20):.0f} MiB",
        )
        table.add_row("", "MB", *(f"{row['bytes'][n] / 1e6:,.0f}" if n in row["bytes"] else "–" for n in names))
        share = row["share_of_bandwidth"]
        label = f"of {row['bandwidth'] / GB:.1f} GB/s"
        table.add_row("", label, *(f"{share[n]:.2f}" if n in share else "–" for n in names))
        share = row["share_of_flops"]
        label = f"of {row['flops'] / GB:.0f} GFLOP/s"
        table.add_row("", label, *(f"{share[n]:.2f}" if n in share else "–" for n in names))
    console.print(table)
    if report["fit"]:
        fit = report["fit"]
        console.print(
            f"attention = {fit['a_seconds']:.3g} s + {fit['b_seconds_per_token'] * 1e6:.1f} µs × context, "
            f"r² = {fit['r_squared']:.5f}, worst residual {100 * fit['worst_relative_residual']:.1f} %"
        )
    largest = max((row["largest_allocation"] for row in report["contexts"] if "seconds" in row), default=0)
    verdict = "within" if largest <= ALLOCATION_LIMIT else "ABOVE"
    console.print(f"largest allocation beside weights and cache: {largest:,} bytes, {verdict} 256 MiB")


if __name__ == "__main__":
    main()
