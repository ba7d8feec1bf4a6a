"""`k3dspark calibrate`: a draft's confidence fitted to what is accepted, for each way of sampling."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3dspark.cli import options
from k3dspark.cli.output import check_place, print_json, table
from k3dspark.cli.progress import Count

if TYPE_CHECKING:
    from k3dspark.training.calibrate import Fitted

DEFAULT_SETTINGS = ("greedy", "temperature=1", "temperature=1,top_p=0.95")


def calibrate(
    target: options.Target = None,
    draft: options.Draft = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            metavar="KEY",
            help='A way of sampling, such as "temperature=0.7,top_p=0.9"; may be repeated.',
            show_default="greedy and two at temperature 1",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Prompts: one a line, or JSON lines with "prompt".', show_default="the target's own"
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=4, help="Most prompts to answer under each setting.")] = 128,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Most tokens of an answer.")
    ] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of written prompts and of sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompts as they are, without the template.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where it goes.", show_default="DRAFT/calibration.json")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also an HTML page with reliability plots.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:
    """Fit a draft's confidence to what is really accepted, for each way of sampling.

    The pair answers prompts with every block verified whole. Half of the prompts are fitted on; the table shows the
    other half, before and after. The result lies beside the draft, where the threshold and cost schedules find it.
    Settings that were fitted before, for the same draft, stay.
    """
    options.require_draft(target, draft)

    from k3dspark.decoding.calibration import CALIBRATION_FILE, Setting, fingerprint, no_confidence_head
    from k3dspark.embedded.pair import EMBEDDED_DRAFT, load_pair
    from k3dspark.training.calibrate import as_json as entry
    from k3dspark.training.calibrate import calibrate as fit
    from k3dspark.training.calibrate import save
    from k3dspark.training.own_prompts import own_prompts
    from k3dspark.training.pipeline import read_prompts

    settings = [Setting.parse(text) for text in setting or DEFAULT_SETTINGS]
    texts = read_prompts(prompts)[:count] if prompts is not None else None
    draft = draft or EMBEDDED_DRAFT
    path = out or draft / CALIBRATION_FILE
    check_place(path, "pass --out FILE, and have the file put beside the draft")
    if report is not None:
        check_place(report)
    pair = load_pair(target, draft, dtype=dtype, threads=threads)
    if pair.draft is None or pair.draft.confidence_head is None:
        raise no_confidence_head()
    if texts is None:
        print(f"{pair.name} writes prompts", file=sys.stderr, flush=True)
        texts = own_prompts(pair, count, seed)
    fitted = []
    for chosen in settings:
        with Count(f"prompts, {chosen.key}", len(texts)) as progress:
            one = fit(
                pair,
                texts,
                chosen,
                max_new_tokens=max_new_tokens,
                batch=batch,
                seed=seed,
                raw=raw,
                on_prompt=progress.add,
            )
        save(path, pair.draft, one)  # at once: what comes later may be interrupted
        fitted.append(one)
        if not as_json:
            _print_table(one)
    if report is not None:
        from k3dspark.training.calibration_report import write_report

        write_report(report, f"{pair.name}, draft {fingerprint(pair.draft)[:23]}…", fitted)
    if as_json:
        print_json(
            {
                "file": str(path),
                "draft": fingerprint(pair.draft),
                "settings": {one.setting.key: entry(one) for one in fitted},
            },
            indent=None,
        )
    else:
        print(f"written: {path}" + (f", {report}" if report is not None else ""))


def _print_table(one: Fitted) -> None:
    from rich.console import Console

    from k3dspark.training.calibration_report import COLUMNS, survival_rows

    rows = table(*((name, "right") for name in COLUMNS))
    for row in survival_rows(one):
        rows.add_row(*row)
    console = Console(highlight=False)
    console.print(f"\n[bold]{one.setting.key}[/]: survival by slot, judged on {len(one.test_rounds):,} rounds")
    console.print(rows)
