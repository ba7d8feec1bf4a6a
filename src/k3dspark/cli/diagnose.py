"""`k3dspark diagnose`: why acceptance is low."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from k3dspark.cli import options
from k3dspark.cli.output import clean, print_json, table
from k3dspark.errors import BadInput, EngineFault

if TYPE_CHECKING:
    from k3dspark.diagnosis.shapes import Diagnosis


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
    lang: Annotated[Literal["en", "zh"], typer.Option(help="Language of the text.")] = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Recognise the shape of low acceptance in metrics, and name likely causes with the test that decides.

    Exit status: 0 nothing wrong found, 1 something was, 2 unusable input, 3 the engine does not answer.
    """
    from k3dspark.diagnosis.evidence import Expectation, from_document
    from k3dspark.diagnosis.observation import from_recording, from_responses
    from k3dspark.diagnosis.shapes import recognise

    if (url is None) == (metrics is None):
        raise BadInput(
            "give either --url or --metrics",
            "a diagnosis needs one source of figures",
            "k3dspark diagnose --url HOST:PORT",
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
