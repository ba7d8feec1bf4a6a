"""`k3dspark diagnose`: why acceptance is low."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from k3dspark.cli import options
from k3dspark.cli.output import check_place, clean, print_json, table
from k3dspark.cli.progress import Count
from k3dspark.errors import BadInput, EngineFault

if TYPE_CHECKING:
    from k3dspark.diagnosis.shapes import Diagnosis

EXPERIMENT = "By experiment"


def diagnose(
    url: Annotated[
        list[str] | None, typer.Option("--url", metavar="URL", help="A running engine; may be repeated.")
    ] = None,
    metrics: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A saved /metrics, two of them (start and end), or a recording of monitor --json."
        ),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Saved responses, one JSON a line: acceptance by context and prefix cache."),
    ] = None,
    block: Annotated[int, typer.Option(min=1, max=64, help="Draft tokens the draft was trained to propose.")] = 7,
    expected: Annotated[float, typer.Option(min=1.01, help="Acceptance length that this workload should reach.")] = 3.0,
    plain: options.PlainUrl = None,
    plain_step_ms: options.PlainStep = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds to watch a running engine.")] = 30.0,
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The verified model.", show_default="the embedded one", rich_help_panel=EXPERIMENT
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its draft.", show_default="the embedded one", rich_help_panel=EXPERIMENT),
    ] = None,
    by_experiment: Annotated[
        bool,
        typer.Option(
            "--experiment",
            help="Experiment with the pair itself; --target or --draft mean it.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, 12 or more.",
            show_default="40 built in",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=9, help="Tokens of each answer.", rich_help_panel=EXPERIMENT)] = 40,
    margin: Annotated[
        float,
        typer.Option(min=0, help="What a change must surely bring, in nats a token.", rich_help_panel=EXPERIMENT),
    ] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the intervals.", rich_help_panel=EXPERIMENT)] = 0,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page.", rich_help_panel=EXPERIMENT)
    ] = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="Language of the text.")] = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Recognise the shape of low acceptance in metrics and name likely causes; or find the cause by experiment.

    From metrics (--url, --metrics) causes come with the test that decides. With --draft and --target the pair itself
    is tried with one thing changed at a time.

    Exit status: 0 nothing wrong found, 1 something was, 2 unusable input, 3 the engine does not answer.
    """
    if by_experiment or target is not None or draft is not None:
        if url is not None or metrics is not None or requests is not None:
            raise BadInput(
                "metrics beside an experiment", "a diagnosis is made from one or the other", "leave one of them out"
            )
        options.require_draft(target, draft)
        _experiment(target, draft, prompts, new_tokens, margin, seed, report, dtype, threads, lang, as_json)
        return
    for option, value in (("--prompts", prompts), ("--report", report)):
        if value is not None:
            raise BadInput(f"{option} without a pair", "metrics need none", "give --draft DIR --target DIR")

    from k3dspark.diagnosis.evidence import Expectation, from_document
    from k3dspark.diagnosis.observation import from_recording, from_responses
    from k3dspark.diagnosis.shapes import recognise

    if (url is None) == (metrics is None):
        raise BadInput(
            "give either --url or --metrics, or a pair to experiment with",
            "a diagnosis needs one source of figures",
            "k3dspark diagnose --url HOST:PORT, or --draft DIR --target DIR",
        )
    plain_seconds = plain_step_ms and plain_step_ms / 1e3
    if url is not None:
        documents = [_watched(url, plain, plain_seconds, interval)]
    else:
        documents = _read(metrics or [], plain_seconds)
    responses = []
    if requests is not None:
        responses = from_responses(_lines(requests), str(requests))
    diagnoses = [
        recognise(evidence, Expectation(block, expected))
        for evidence in from_document(documents[-1])
        for evidence in [_with_observations(evidence, responses or from_recording(documents, evidence.model))]
    ]
    if not diagnoses:
        raise BadInput(
            "no engine is in these figures", "no known family was found", "check that it is an engine's /metrics"
        )
    if as_json:
        print_json({"format": 1, "level": "metrics", "lang": lang, "models": [_entry(d, lang) for d in diagnoses]})
    else:
        _print(diagnoses, lang)
    if any(diagnosis.found for diagnosis in diagnoses):
        raise typer.Exit(1)


def _experiment(
    target: Path | None,
    draft: Path | None,
    prompts: Path | None,
    new_tokens: int,
    margin: float,
    seed: int,
    report: Path | None,
    dtype: options.DTypeName,
    threads: int | None,
    lang: str,
    as_json: bool,
) -> None:
    from k3dspark.diagnosis.prompts import PROMPTS, read_prompts

    texts = read_prompts(prompts) if prompts is not None else PROMPTS
    if report is not None:
        check_place(report)

    import torch

    from k3dspark.diagnosis.experiment import ExperimentSettings, experiment
    from k3dspark.diagnosis.report import experiment_page, experiment_record
    from k3dspark.diagnosis.subject import open_subject

    if threads is not None:
        torch.set_num_threads(threads)
    words = _wording(lang)
    with Count("wirings", 1) as progress:
        found = experiment(
            open_subject(target, draft, dtype),
            texts or PROMPTS,
            ExperimentSettings(new_tokens=new_tokens, margin=margin, seed=seed),
            progress.reach,
        )
    record = experiment_record(found, words)
    if report is not None:
        experiment_page(record, words, lang).write(report)
    if as_json:
        print_json({**record, "lang": lang})
    else:
        _print_experiment(record, words)
    if record["verdict"] != "nothing_wrong":
        raise typer.Exit(1)


def _print_experiment(record: dict[str, Any], words: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    from k3dspark.diagnosis.report import judged_rows, summary, with_change

    console = Console(highlight=False)
    console.print(Text(clean(record["draft"]), "bold"), clean(summary(record, words)), soft_wrap=True)
    healthy = record["verdict"] == "nothing_wrong"
    console.print(Text(words.VERDICTS[record["verdict"]], "green" if healthy else "bold red"))
    for number, entry in enumerate(record["causes"], 1):
        console.print(Text.assemble(f"{number}. ", (entry["title"], "bold"), f": {entry['with']}"), soft_wrap=True)
        console.print(f"   {with_change(entry, words)}\n   {entry['remedy']}", soft_wrap=True, markup=False)
    low = record["context"]["interval"][0]
    if low <= record["margin_nats"]:
        console.print(Text(words.EXPERIMENT["context_unused"], "yellow"), soft_wrap=True)
    rows = table(*((name, "left") for name in words.EXPERIMENT_COLUMNS))
    for row in judged_rows(record, words):
        rows.add_row(*(Text(clean(cell)) for cell in row))
    console.print(rows)
    for entry in record["not_tried"]:
        text = f"{words.EXPERIMENT['not_tried']}: {words.CHANGES[entry['id']][0]} ({entry['what']})"
        console.print(Text(text, "dim"), soft_wrap=True)


def _with_observations(evidence: Any, observations: Any) -> Any:
    from dataclasses import replace

    return replace(evidence, observations=tuple(observations))


def _watched(urls: list[str], plain: str | None, plain_seconds: float | None, interval: float) -> dict[str, Any]:
    from k3dspark.monitoring.monitor import Costs, Monitor
    from k3dspark.monitoring.scrape import Scraper, address
    from k3dspark.monitoring.snapshot import document

    monitor = Monitor(
        [address(url) for url in urls], interval, Costs(plain_seconds), address(plain) if plain is not None else None
    )
    with Scraper() as scraper:
        monitor.poll(scraper)
        time.sleep(interval)
        snapshot = monitor.poll(scraper)
    if not snapshot.models:
        faults = "; ".join(f"{source.source}: {source.fault}" for source in snapshot.sources)
        raise EngineFault("no engine answers", faults, "check that the engine runs, its port and the firewall")
    return document(snapshot)


def _read(paths: list[Path], plain_seconds: float | None) -> list[dict[str, Any]]:
    """Documents of saved figures: a recording's, or the one of one or two scrapes."""
    from k3dspark.monitoring.saved import of_scrapes, recording
    from k3dspark.monitoring.snapshot import document

    texts = ["\n".join(_lines(path)) + "\n" for path in paths]
    if texts[0].lstrip().startswith("{"):
        return recording(texts[0], str(paths[0]))
    return [document(of_scrapes(texts, [str(path) for path in paths], plain_seconds))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadInput(f"cannot read {path}", str(error.strerror or error), "check the path") from error


def _wording(lang: str) -> Any:
    if lang == "zh":
        from k3dspark.diagnosis import wording_zh

        return wording_zh
    from k3dspark.diagnosis import wording_en

    return wording_en


def _entry(diagnosis: Diagnosis, lang: str) -> dict[str, Any]:
    words = _wording(lang)
    return {
        "model": diagnosis.model,
        "found": [
            {
                "shape": found.shape,
                "title": words.SHAPES[found.shape][0],
                "evidence": words.SHAPES[found.shape][1].format_map(found.facts),
                "facts": found.facts,
                "causes": [
                    {"id": cause, "cause": words.CAUSES[cause][0], "decides": words.CAUSES[cause][1]}
                    for cause in found.causes
                ],
            }
            for found in diagnosis.found
        ],
        "unjudged": [{"id": item, "what": words.UNJUDGED[item]} for item in diagnosis.unjudged],
    }


def _print(diagnoses: list[Diagnosis], lang: str) -> None:
    from rich.console import Console
    from rich.text import Text

    words, console = _wording(lang), Console(highlight=False)
    for diagnosis in diagnoses:
        console.print(Text(clean(diagnosis.model) or "?", "bold"))
        entry = _entry(diagnosis, lang)
        for found in entry["found"]:
            console.print(Text.assemble((found["title"], "bold red"), f": {clean(found['evidence'])}"), soft_wrap=True)
            rows = table(*((name, "left") for name in words.COLUMNS))
            for number, cause in enumerate(found["causes"], 1):
                rows.add_row(str(number), cause["cause"], cause["decides"])
            console.print(rows)
        if not entry["found"]:
            judged = "too_few_rounds" not in diagnosis.unjudged
            console.print(
                Text(words.LABELS["nothing" if judged else "nothing_judged"], "green" if judged else "yellow")
            )
        for item in entry["unjudged"]:
            console.print(Text(f"{words.LABELS['unjudged']}: {item['what']}", "dim"), soft_wrap=True)
