"""An experiment as plain data, and as a page."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from k3dspark.diagnosis.experiment import Experiment, Judged
from k3dspark.page import Page


def experiment_record(found: Experiment, words: ModuleType) -> dict[str, Any]:
    """Everything as JSON data, in the language of `words`; the fields are documented in docs/diagnose.md."""
    return {
        "format": 1,
        "level": "experiment",
        "target": found.target,
        "draft": found.draft,
        "verdict": found.verdict,
        "prompts": found.prompts,
        "blocks": found.anchors,
        "acceptance_length": found.length,
        "margin_nats": found.margin,
        "confidence_level": found.level,
        "context": {"gain_nats": found.context_gain, "interval": list(found.context_interval)},
        "causes": [_change(judged, words) for judged in found.causes],
        "judged": [_change(judged, words) for judged in found.judged],
        "screened": [{"id": change, "with": detail, "gain_nats": gain} for change, detail, gain in found.screened],
        "not_tried": [
            {"id": change, "reason": reason, "what": words.NOT_TRIED[reason]}
            for change, reason in found.not_tried.items()
        ],
    }


def summary(record: dict[str, Any], words: ModuleType) -> str:
    """How much was seen, in one line."""
    return str(
        words.EXPERIMENT["summary"].format(
            length=record["acceptance_length"],
            anchors=record["blocks"],
            prompts=record["prompts"],
            target=record["target"],
        )
    )


def with_change(entry: dict[str, Any], words: ModuleType) -> str:
    """What a change would bring, in one line."""
    low, high = entry["acceptance_length_gain_interval"]
    return str(words.EXPERIMENT["with_change"].format(length=entry["acceptance_length"], low=low, high=high))


def judged_rows(record: dict[str, Any], words: ModuleType) -> list[list[str]]:
    """The judged changes in the order of `words.EXPERIMENT_COLUMNS`."""
    return [
        [
            entry["title"],
            entry["with"],
            f"{entry['gain_nats']:+.3f} ({_interval(entry['gain_interval'], 3)})",
            f"{entry['acceptance_length']:.2f}",
            f"{entry['acceptance_length_gain']:+.2f} ({_interval(entry['acceptance_length_gain_interval'], 2)})",
            words.YES_NO[entry["restores"]],
        ]
        for entry in record["judged"]
    ]


def experiment_page(record: dict[str, Any], words: ModuleType, lang: str) -> Page:
    """The record as a page."""
    page = Page(f"k3dspark diagnose: {record['draft']}", summary(record, words), lang)
    page.text(words.VERDICTS[record["verdict"]], "good" if record["verdict"] == "nothing_wrong" else "bad")
    for entry in record["causes"]:
        page.text(f"{entry['title']}: {entry['with']}. {with_change(entry, words)}. {entry['remedy']}")
    page.heading(words.EXPERIMENT["judged"])
    page.table(words.EXPERIMENT_COLUMNS, judged_rows(record, words), text_columns=(0, 1))
    page.heading(words.EXPERIMENT["not_tried"])
    rows = [[words.CHANGES[entry["id"]][0], entry["what"]] for entry in record["not_tried"]]
    page.table(("", ""), rows, text_columns=(0, 1))
    return page


def _change(judged: Judged, words: ModuleType) -> dict[str, Any]:
    title, remedy = words.CHANGES[judged.candidate.change]
    return {
        "id": judged.candidate.change,
        "title": title,
        "with": judged.candidate.detail,
        "remedy": remedy,
        "restores": judged.restores,
        "gain_nats": judged.gain,
        "gain_interval": list(judged.gain_interval),
        "acceptance_length": judged.length,
        "acceptance_length_gain": judged.length_gain,
        "acceptance_length_gain_interval": list(judged.length_interval),
    }


def _interval(bounds: list[float], digits: int) -> str:
    return f"{bounds[0]:+.{digits}f} … {bounds[1]:+.{digits}f}"
