"""`k3dspark evaluate` on a small random pair: its JSON, its tables, its page, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from k3dspark.cli.main import app
from tiny_models import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    target, draft = write_pair(root)
    return ["--target", str(target), "--draft", str(draft), "--dtype", "float32", "-n", "16"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    entries = [{"domain": "tea", "prompt": "Hot?"}, {"domain": "[red]", "prompt": "Cold?"}]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", *arguments])


def test_json_has_the_documented_fields_and_repeats_to_the_bit(pair: list[str], prompts: str) -> None:
    done = evaluate(*pair, prompts, "--json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert list(record) == [
        "target", "draft", "dtype", "block_size", "max_new_tokens", "verifier", "seed", "settings",
    ]  # fmt: skip
    assert [s["temperature"] for s in record["settings"]] == [0.0, 1.0]
    groups = record["settings"][1]["groups"]
    assert list(groups) == ["all", "tea", "[red]"]
    assert list(groups["tea"]) == [
        "prompts", "rounds", "drafted", "accepted", "new_tokens", "acceptance_length", "acceptance_length_interval",
        "acceptance_rate", "per_slot_acceptance", "conditional_acceptance", "tokens_per_second", "confidence",
    ]  # fmt: skip
    again = json.loads(evaluate(*pair, prompts, "--json").stdout)
    for found in (record, again):
        for setting in found["settings"]:
            for group in setting["groups"].values():
                del group["tokens_per_second"]
    assert record == again


def test_tables_show_each_domain_as_it_is_written_and_progress_goes_to_standard_error(
    pair: list[str], prompts: str
) -> None:
    done = evaluate(*pair, prompts, "--temperature", "0.7")
    assert done.exit_code == 0, done.stderr
    assert "temperature 0.7" in done.stdout
    assert "[red]" in done.stdout
    assert "AUROC" in done.stdout
    assert "2 of 2 prompts" in done.stderr


def test_the_report_is_one_page_with_figures_for_both_settings(pair: list[str], prompts: str, tmp_path: Path) -> None:
    page = tmp_path / "new" / "report.html"
    done = evaluate(*pair, prompts, "--report", str(page))
    assert done.exit_code == 0, done.stderr
    html = page.read_text(encoding="utf-8")
    assert "Greedy" in html
    assert "Temperature 1" in html
    assert html.count("Plotly.newPlot(") >= 7
    assert not re.search(r"""<(?:script|link|img)[^>]*(?:src|href)=""", html)


def test_one_domain_is_measured_alone(pair: list[str], prompts: str) -> None:
    record = json.loads(evaluate(*pair, prompts, "--json", "--domain", "tea", "--temperature", "0").stdout)
    assert list(record["settings"][0]["groups"]) == ["all"]
    assert record["settings"][0]["groups"]["all"]["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--temperature", "-1"], "temperature is -1.0"), (["--temperature", "nan"], "--temperature nan"),
     (["--domain", "milk"], "no prompt of domain 'milk'"), (["--report", "."], "cannot write")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    pair: list[str], prompts: str, arguments: list[str], words: str
) -> None:
    done = evaluate("--target", "/nowhere", "--draft", "/nowhere", prompts, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_target_without_its_draft_is_refused_once_it_is_there(prompts: str, tmp_path: Path) -> None:
    done = evaluate("--target", str(tmp_path), prompts)
    assert done.exit_code == 2
    assert f"no draft for {tmp_path}" in done.stderr
    assert "there is no directory /nowhere" in evaluate("--target", "/nowhere", prompts).stderr
