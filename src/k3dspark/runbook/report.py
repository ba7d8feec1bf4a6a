"""A run as Markdown and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from k3dspark.checkpoint.files import replacing, write_json
from k3dspark.page import Page
from k3dspark.runbook.run import Record

TITLES: Final = {
    "en": {
        "fetch": "fetched and verified",
        "inspect": "config and tensors",
        "check": "this node",
        "load": "weights load",
        "map": "layers mapped",
        "cache": "context cache and YaRN",
        "confidence": "confidence head",
        "accept": "lossless",
        "monitor": "watched",
    },
    "zh": {
        "fetch": "下载并校验",
        "inspect": "配置与张量",
        "check": "本节点检查",
        "load": "加载权重",
        "map": "层映射",
        "cache": "上下文缓存与 YaRN",
        "confidence": "置信度头",
        "accept": "无损性验收",
        "monitor": "监控",
    },
}
WORDS: Final = {
    "en": {"title": "Runbook", "step": "step", "status": "status", "found": "found", "fact": "fact", "value": "value",
           "advice": "what to do", "passed": "every step passed", "failed": "a step failed", "open": "not finished"},
    "zh": {"title": "上线检查清单", "step": "步骤", "status": "状态", "found": "结果", "fact": "事实", "value": "值",
           "advice": "应做的事", "passed": "所有步骤均通过", "failed": "有步骤未通过", "open": "尚未完成"},
}  # fmt: skip
STATUSES: Final = {
    "en": {"pass": "pass", "warn": "warn", "fail": "fail", "skip": "skipped"},
    "zh": {"pass": "通过", "warn": "警告", "fail": "失败", "skip": "跳过"},
}
_TONES: Final = {"pass": "good", "warn": "warn", "fail": "bad", "skip": "dim"}


def verdict(record: Record, lang: str) -> str:
    """The run in a few words."""
    return WORDS[lang]["passed" if record.passed else "open" if not record.complete else "failed"]


def rows(record: Record, lang: str) -> list[tuple[str, str, str]]:
    """(step, status, summary) of each finished step."""
    return [
        (f"{step}: {TITLES[lang][step]}", STATUSES[lang][outcome.status], outcome.summary)
        for step, outcome in record.outcomes.items()
    ]


def markdown(record: Record, lang: str = "en") -> str:
    """The whole run, facts and advice included."""
    words = WORDS[lang]
    lines = [f"# {words['title']}", "", verdict(record, lang), ""]
    lines += [f"| {words['step']} | {words['status']} | {words['found']} |", "|---|---|---|"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows(record, lang)]
    for step, outcome in record.outcomes.items():
        lines += [
            "",
            f"## {step}: {TITLES[lang][step]}",
            "",
            f"{STATUSES[lang][outcome.status]}. {outcome.summary}",
            "",
        ]
        lines += [f"- {words['advice']}: {line}" for line in outcome.advice]
        lines += ["", f"| {words['fact']} | {words['value']} |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in {**outcome.facts, **outcome.figures}.items()]
    return "\n".join(lines) + "\n"


def page(record: Record, lang: str = "en") -> Page:
    """The same as a page."""
    words = WORDS[lang]
    result = Page(words["title"], f"{record.asked.get('draft') or 'k3dspark'} · {record.asked.get('version')}", lang)
    result.text(verdict(record, lang), "good" if record.passed else "bad")
    result.table((words["step"], words["status"], words["found"]), rows(record, lang), text_columns=(1, 2))
    for step, outcome in record.outcomes.items():
        result.heading(f"{step}: {TITLES[lang][step]}")
        result.text(f"{STATUSES[lang][outcome.status]}. {outcome.summary}", _TONES[outcome.status])
        for line in outcome.advice:
            result.text(line, "dim")
        facts = [(name, str(value)) for name, value in {**outcome.facts, **outcome.figures}.items()]
        result.table((words["fact"], words["value"]), facts, text_columns=(1,))
    return result


def write(record: Record, directory: Path, lang: str = "en") -> None:
    """report.json, report.md and report.html, each whole or not at all."""
    write_json(directory / "report.json", record.as_json())
    with replacing(directory / "report.md") as file:
        file.write(markdown(record, lang).encode())
    page(record, lang).write(directory / "report.html")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
