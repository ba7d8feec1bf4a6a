"""`k3dspark plan`: the memory a draft takes on a cluster, and the files that launch it there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import clean, print_json, table

if TYPE_CHECKING:
    from k3dspark.deploy.launch_files import LaunchDirectory
    from k3dspark.deploy.memory import MemoryPlan

_MEMORY, _ENGINE, _CLUSTER, _SPECULATION = "Memory", "Engine and files", "Cluster", "Speculation"


def plan(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The draft's directory; without it, the published config.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(metavar="LIST", help="Context lengths to tabulate.", rich_help_panel=_MEMORY)
    ] = "8k,32k,128k,1M",
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of sequences to tabulate.", rich_help_panel=_MEMORY)
    ] = "1,4,16,64",
    device_gb: Annotated[
        str, typer.Option("--device-gb", metavar="LIST", help="Device sizes in GB.", rich_help_panel=_MEMORY)
    ] = "16,32,64",
    dtype: Annotated[
        str, typer.Option(help="Weights: bfloat16, fp8 or float32.", rich_help_panel=_MEMORY)
    ] = "bfloat16",
    cache_dtype: Annotated[
        str, typer.Option(help="Latent cache: bfloat16, fp8 or float32.", rich_help_panel=_MEMORY)
    ] = "bfloat16",
    utilisation: Annotated[
        float, typer.Option(help="Share of a device that the engine takes.", rich_help_panel=_MEMORY)
    ] = 0.9,
    overhead_gb: Annotated[
        float | None,
        typer.Option("--overhead-gb", help="Measured memory beside weights and cache.", rich_help_panel=_MEMORY),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm-ascend, vllm or sglang.", rich_help_panel=_ENGINE)] = None,
    engine_version: Annotated[
        str, typer.Option(metavar="VERSION", help="Its version; what it lacks is refused.", rich_help_panel=_ENGINE)
    ] = "",
    build_has: Annotated[
        list[str] | None,
        typer.Option(metavar="FEATURE", help="Your build has this, no release does.", rich_help_panel=_ENGINE),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the launch files here.", rich_help_panel=_ENGINE)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an older plan there.", rich_help_panel=_ENGINE)
    ] = False,
    target: Annotated[
        str, typer.Option(metavar="PATH", help="The target, as the nodes see it.", rich_help_panel=_ENGINE)
    ] = "",
    draft: Annotated[
        str, typer.Option(metavar="PATH", help="The draft, as the nodes see it; else DIR.", rich_help_panel=_ENGINE)
    ] = "",
    home: Annotated[
        str, typer.Option(metavar="PATH", help="Where the files lie on nodes; else --out.", rich_help_panel=_ENGINE)
    ] = "",
    python: Annotated[
        str, typer.Option(metavar="PROGRAM", help="The engine's Python.", rich_help_panel=_ENGINE)
    ] = "python3",
    quantization: Annotated[
        str, typer.Option(help="The target's, e.g. ascend or modelslim.", rich_help_panel=_ENGINE)
    ] = "",
    served_name: Annotated[str, typer.Option(help="The name clients ask for.", rich_help_panel=_ENGINE)] = "",
    image: Annotated[str, typer.Option(help="Container image of the manifest.", rich_help_panel=_ENGINE)] = "",
    user: Annotated[str, typer.Option(help="User of the systemd unit.", rich_help_panel=_ENGINE)] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the checkpoint's Python.", rich_help_panel=_ENGINE)
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="No graphs.", rich_help_panel=_ENGINE)] = False,
    nodes: Annotated[int, typer.Option(help="Machines.", rich_help_panel=_CLUSTER)] = 1,
    devices: Annotated[int, typer.Option(help="Devices in each.", rich_help_panel=_CLUSTER)] = 1,
    device: Annotated[str, typer.Option(help="npu-a3, npu-a2, cuda or cpu.", rich_help_panel=_CLUSTER)] = "",
    hosts: Annotated[str, typer.Option(metavar="LIST", help="Hosts, the head first.", rich_help_panel=_CLUSTER)] = "",
    interface: Annotated[
        str, typer.Option(help="Network between nodes; else found by address.", rich_help_panel=_CLUSTER)
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the server.", rich_help_panel=_CLUSTER)] = 8000,
    rpc_port: Annotated[int, typer.Option(help="Port where nodes meet.", rich_help_panel=_CLUSTER)] = 13389,
    tensor_parallel: Annotated[
        int, typer.Option(help="The target's; else all devices of a node.", rich_help_panel=_CLUSTER)
    ] = 0,
    pipeline_parallel: Annotated[int, typer.Option(help="Stages.", rich_help_panel=_CLUSTER)] = 1,
    decode_context_parallel: Annotated[int, typer.Option(help="Parts of the context.", rich_help_panel=_CLUSTER)] = 1,
    context: Annotated[
        str, typer.Option(metavar="N", help="Longest sequence; else 128k.", rich_help_panel=_CLUSTER)
    ] = "0",
    sequences: Annotated[int, typer.Option(help="Sequences at once in a replica.", rich_help_panel=_CLUSTER)] = 16,
    draft_tokens: Annotated[
        int, typer.Option(help="Proposals a round; else the whole block.", rich_help_panel=_SPECULATION)
    ] = 0,
    draft_tensor_parallel: Annotated[
        int, typer.Option(help="The draft's: 1 or the target's.", rich_help_panel=_SPECULATION)
    ] = 0,
    sampling: Annotated[
        str, typer.Option(help="Drafting: greedy or probabilistic.", rich_help_panel=_SPECULATION)
    ] = "greedy",
    rejection: Annotated[
        str, typer.Option(help="Verification: standard or block.", rich_help_panel=_SPECULATION)
    ] = "standard",
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Confidence-scheduled verification.", rich_help_panel=_SPECULATION)
    ] = False,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="On, at the cost of acceptance.", rich_help_panel=_SPECULATION)
    ] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Tell what memory a draft takes, what fits on a device, and write the files that launch it on a cluster.

    Numbers take k and M (1024 and 1024²). Nothing is started and nothing is downloaded. Exit status: 0 done, 2 the
    engine cannot do what is asked, or the config is unusable.
    """
    from k3dspark.checkpoint.jsonfile import read_config
    from k3dspark.checkpoint.published import published_config
    from k3dspark.checkpoint.rules import require
    from k3dspark.deploy.cache_groups import TargetLayout
    from k3dspark.deploy.launch_files import write_launch_files
    from k3dspark.deploy.memory import GB, Overhead, Wish, plan_memory
    from k3dspark.deploy.options import DraftFacts, LaunchWish, settle
    from k3dspark.errors import BadInput

    # Both comparisons are false for nan.
    if overhead_gb is not None and not 0 <= overhead_gb < 1e6:
        raise BadInput(f"--overhead-gb {overhead_gb} is no size", "it is a number of GB, 0 or more", "correct it")
    config = published_config() if directory is None else read_config(directory)
    require(config, str(directory or "the published config"))
    facts = DraftFacts.of(config)
    if out is not None and engine is None:
        raise BadInput("--out needs --engine", "each engine has files of its own", "pass --engine vllm-ascend, …")
    if out is not None and not target:
        raise BadInput("--out needs --target", "a draft is launched beside its target", "pass the target's path")
    launch = None
    if engine is not None:
        launch = settle(
            facts,
            LaunchWish(
                engine=engine,
                draft=draft or (str(directory.absolute()) if directory else "/models/draft"),
                target=target or "/models/target",
                version=engine_version,
                device=device,
                nodes=nodes,
                devices=devices,
                hosts=tuple(hosts.split(",")) if hosts else (),
                interface=interface,
                port=port,
                rpc_port=rpc_port,
                tensor_parallel=tensor_parallel,
                context=_number(context),
                sequences=sequences,
                draft_tokens=draft_tokens,
                draft_tensor_parallel=draft_tensor_parallel,
                sampling=sampling,
                rejection=rejection,
                adaptive=adaptive,
                prefix_caching=prefix_caching,
                decode_context_parallel=decode_context_parallel,
                pipeline_parallel=pipeline_parallel,
                cache_dtype="fp8" if cache_dtype == "fp8" else "auto",
                quantization=quantization,
                utilisation=utilisation,
                eager=eager,
                trust_remote_code=trust_remote_code,
                build_has=tuple(build_has or ()),
                served_name=served_name,
                image=image,
                user=user,
                home=home,
                python=python,
            ),
        )
    wish = Wish(
        contexts=_numbers(contexts),
        concurrency=_numbers(concurrency),
        devices_gb=_numbers(device_gb),
        dtype=dtype,
        cache_dtype=cache_dtype,
        tensor_parallel=launch.wish.draft_tensor_parallel if launch else max(draft_tensor_parallel, 1),
        target_tensor_parallel=launch.wish.tensor_parallel if launch else 16,
        utilisation=utilisation,
        overhead=Overhead() if overhead_gb is None else Overhead(int(overhead_gb * GB), 0, 0),
        shares_embeddings=launch is not None and launch.engine.name == "vllm",
    )
    memory = plan_memory(config, wish, TargetLayout() if facts.for_kimi_k3 else None)
    written = write_launch_files(facts, launch.wish, out, force) if launch is not None and out is not None else None
    warnings = launch.warnings if launch else ()
    if report is not None:
        from k3dspark.cli.plan_report import memory_page

        memory_page(memory, str(directory or "published config"), warnings).write(report)
    if as_json:
        print_json(_as_json(directory, memory, written, warnings))
        return
    _print(memory)
    _print_launch(written, warnings, report)


def _number(text: str) -> int:
    from k3dspark.errors import BadInput

    scale = {"k": 1024, "m": 1024**2}.get(text.strip()[-1:].lower(), 1)
    try:
        return int(text.strip().rstrip("kKmM")) * scale
    except ValueError as error:
        raise BadInput(f"{text!r} is no number", "numbers look like 4096, 32k or 1M", "correct it") from error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_number(part) for part in text.split(",")}))


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def _short(tokens: int) -> str:
    for scale, letter in ((1024**2, "M"), (1024, "k")):
        if tokens >= scale and tokens % scale == 0:
            return f"{tokens // scale}{letter}"
    return str(tokens)


def _print(memory: MemoryPlan) -> None:
    from rich.console import Console

    console, wish = Console(highlight=False), memory.wish
    split = f", each of {wish.tensor_parallel} devices" if wish.tensor_parallel > 1 else ""
    console.print(
        f"weights {_gb(memory.weights)} GB ({wish.dtype}{split}); cache {memory.row_bytes:,} bytes a token "
        f"({wish.cache_dtype}), {_gb(memory.row_bytes * memory.largest_context)} GB at "
        f"{memory.largest_context:,} tokens",
        soft_wrap=True,
    )
    device = "none of these sizes" if memory.smallest_gb is None else f"{memory.smallest_gb} GB"
    long = "none of these sizes" if memory.long_gb is None else f"{memory.long_gb} GB"
    console.print(
        f"smallest device: {device}; for the whole context of {_short(memory.largest_context)}: {long}\n",
        soft_wrap=True,
    )
    numbers = [
        (name, "right") for name in ("sequences", "weights", "cache", "workspace", "overhead", "total GB", "fits")
    ]
    cells = table(("context", "right"), *numbers)
    for cell in memory.cells:
        fits = f"{cell.device_gb} GB" if cell.device_gb else "no"
        parts = (cell.weights, cell.cache, cell.workspace, cell.overhead, cell.total)
        cells.add_row(_short(cell.context), str(cell.sequences), *map(_gb, parts), fits)
    console.print(cells)
    rooms = table(("device", "right"), ("tokens in all", "right"), *(
        (f"× {_short(context)}", "right") for context, _ in memory.rooms[0].sequences))  # fmt: skip
    for room in memory.rooms:
        rooms.add_row(f"{room.device_gb} GB", f"{room.tokens:,}", *(str(n) for _, n in room.sequences))
    console.print("\nwhat a device holds: cached tokens, and sequences of each length", soft_wrap=True)
    console.print(rooms)
    splits = table(("draft tensor parallel", "right"), ("weights GB a device", "right"), ("", "left"))
    for each in memory.splits:
        splits.add_row(str(each.tensor_parallel), _gb(each.weights), each.why)
    console.print("\nsplitting the draft; its cache is whole on each device", soft_wrap=True)
    console.print(splits)
    dtypes = table(("weights", "left"), ("cache", "left"), ("weights GB", "right"), ("bytes a token", "right"))
    for weights, cache, size, row in memory.dtypes:
        dtypes.add_row(weights, cache, _gb(size), f"{row:,}")
    console.print()
    console.print(dtypes)
    if memory.joining:
        joining = table(("context", "right"), ("Kimi K3 alone", "right"), ("with the draft", "right"),
                        ("the draft's rows", "right"), ("padding, states", "right"))  # fmt: skip
        for cost in memory.joining:
            joining.add_row(_short(cost.tokens), *map(_gb, (cost.alone, cost.joined, cost.rows, cost.padding)))
        console.print(
            f"\njoined to Kimi K3's cache groups in vLLM: GB of one sequence on each of "
            f"{wish.target_tensor_parallel} devices; padding layers and the states that rollback needs come on top",
            soft_wrap=True,
        )
        console.print(joining)
    overhead = wish.overhead.bytes(wish.tensor_parallel)
    console.print(
        f"\nassumed: {_gb(overhead)} GB for driver, graphs and link buffers, {wish.utilisation:.0%} of a device "
        "usable. Measure yours and pass --overhead-gb.",
        style="dim",
        soft_wrap=True,
    )


def _print_launch(written: LaunchDirectory | None, warnings: Any, report: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for warning in warnings:
        console.print(Text.assemble(("\nwarning: ", "bold yellow"), clean(warning.what)), soft_wrap=True)
        console.print(
            Text.assemble(("     do: ", "green"), clean(f"{warning.remedy} [{warning.source}]")), soft_wrap=True
        )
    if written is not None:
        console.print(f"\nwrote {written.path}: {', '.join(sorted(written.checksums))}", soft_wrap=True)
        console.print(f"next: k3dspark launch {written.path}", style="dim", soft_wrap=True)
    if report is not None:
        console.print(f"report: {report}", style="dim", soft_wrap=True)


def _as_json(directory: Path | None, memory: MemoryPlan, written: LaunchDirectory | None, warnings: Any) -> Any:
    return {
        "format": 1,
        "directory": None if directory is None else str(directory),
        "memory": {
            "dtype": memory.wish.dtype,
            "cache_dtype": memory.wish.cache_dtype,
            "tensor_parallel": memory.wish.tensor_parallel,
            "utilisation": memory.wish.utilisation,
            "weights_bytes": memory.weights,
            "cache_bytes_per_token": memory.row_bytes,
            "largest_context": memory.largest_context,
            "smallest_device_gb": memory.smallest_gb,
            "smallest_device_gb_at_largest_context": memory.long_gb,
            "cells": [{**asdict(cell), "total": cell.total} for cell in memory.cells],
            "devices": [
                {
                    "device_gb": room.device_gb,
                    "usable_bytes": room.usable,
                    "tokens": room.tokens,
                    "sequences": [{"context": context, "sequences": n} for context, n in room.sequences],
                }
                for room in memory.rooms
            ],
            "splits": [asdict(split) for split in memory.splits],
            "dtypes": [
                {"dtype": d, "cache_dtype": c, "weights_bytes": w, "cache_bytes_per_token": r}
                for d, c, w, r in memory.dtypes
            ],
            "joined_to_kimi_k3": [{**asdict(cost), "padding": cost.padding} for cost in memory.joining],
        },
        "launch": None
        if written is None
        else {
            "directory": str(written.path),
            "files": sorted(written.checksums),
            "wish": written.settled.wish.as_json(),
        },
        "warnings": [{"id": w.id, "what": w.what, "remedy": w.remedy, "source": w.source} for w in warnings],
    }
