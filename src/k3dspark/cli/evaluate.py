"""`k3dspark evaluate`: acceptance of a draft on prompt files, by domain, and how far its confidence can be believed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from k3dspark.cli import options
from k3dspark.cli.output import check_place, clean, print_json, table
from k3dspark.cli.progress import Count


def evaluate(
    prompts: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROMPTS…", help='JSON lines with "prompt" and "domain", or text with one prompt a line.'
        ),
    ],
    target: options.Target = None,
    draft: options.Draft = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Sampling temperature, 0 for greedy; may be given several times.", show_default="0 and 1"),
    ] = None,
    verifier: Annotated[Literal["block", "token"], typer.Option(help="How sampled drafts are verified.")] = "block",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Most tokens an answer.")] = 128,
    domain: Annotated[
        list[str] | None, typer.Option(help="Only this domain; may be given several times.", show_default="all")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts of each domain.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and of the intervals.")] = 980406,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with tables and plots.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure a draft: acceptance length, rate and slots by domain, greedily and sampled, and its confidence.

    One request at a time, the whole block verified, counters pooled over prompts. Figures do not depend on the speed
    of the machine, and those of a prompt not on the other prompts.
    """
    options.require_draft(target, draft)
    from k3dspark.decoding import SamplingParams
    from k3dspark.training.measure import MeasureSettings, read_evaluation_prompts

    chosen = read_evaluation_prompts(prompts, domain or (), limit)
    settings = [
        MeasureSettings(value, max_new_tokens, seed, verifier) for value in dict.fromkeys(temperature or (0.0, 1.0))
    ]
    for setting in settings:
        SamplingParams(temperature=setting.temperature)  # refused before a model is loaded
    if report is not None:
        check_place(report)

    from k3dspark.embedded.pair import EMBEDDED_DRAFT, load_pair
    from k3dspark.training.measure import groups, measure, measurement_record

    place = draft if draft is not None else EMBEDDED_DRAFT
    pair = load_pair(target, place, dtype=dtype, threads=threads)
    assert pair.draft is not None
    with_confidence = pair.draft.confidence_head is not None
    name = "the embedded draft" if draft is None else draft.resolve().name
    with Count("prompts", len(chosen) * len(settings)) as progress:
        found = [
            (setting, groups(measure(pair, chosen, setting, lambda _: progress.add()), with_confidence, seed))
            for setting in settings
        ]
    record = measurement_record(pair, name, found)
    if report is not None:
        from k3dspark.training.measure_page import evaluation_page

        evaluation_page(record).write(report)
    if as_json:
        print_json(record)
    else:
        _print_tables(record)


def _print_tables(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from k3dspark.training.measure_page import reliability_rows, temperature_name

    console = Console(highlight=False)
    for setting in record["settings"]:
        title = f"{record['draft']} for {record['target']}, {temperature_name(setting['temperature'])}"
        console.print(f"\n[bold]{escape(clean(title))}[/]", soft_wrap=True)
        rows = table(
            ("domain", "left"), ("prompts", "right"), ("rounds", "right"), ("acceptance length", "right"),
            ("95 % interval", "right"), ("rate", "right"), ("% at slot 1, 2, …", "left"),
        )  # fmt: skip
        for name, group in setting["groups"].items():
            rows.add_row(
                escape(clean(name)), str(group["prompts"]), f"{group['rounds']:,}",
                f"{group['acceptance_length']:.2f}", "{:.2f}–{:.2f}".format(*group["acceptance_length_interval"]),
                f"{group['acceptance_rate']:.1%}", " ".join(f"{100 * x:.0f}" for x in group["per_slot_acceptance"]),
            )  # fmt: skip
        console.print(rows)
        whole = setting["groups"]["all"]
        conditional = " ".join(f"{x:.0%}" for x in whole["conditional_acceptance"])
        console.print(f"accepted at a slot, where the slot before it was: {conditional}", soft_wrap=True)
        if whole["confidence"] is None:
            continue
        rows = table(
            ("survival", "left"), ("observed", "right"), ("predicted", "right"), ("happened", "right"),
            ("ECE", "right"), ("AUROC", "right"), ("Brier", "right"),
        )  # fmt: skip
        for row in reliability_rows(whole["confidence"]["survival"]):
            rows.add_row("all slots" if row[0] == "all" else f"slot {row[0]}", *row[1:])
        console.print(rows)
